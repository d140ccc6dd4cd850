"""Where the ranks of a test run: in spawned processes, or as a job over emulated hosts.

A *layout* is written as ranks per host: 2+2 or 3+1, with MPICH; openmpi:2+2 with Open MPI; torchrun:2+2 by torchrun; 4
is one host, the machine itself, which needs no rig. pytest's --job, or C10D_TEST_JOB in the environment, chooses one.
"""

import os
from dataclasses import dataclass

from rig import Hosts
from rig.mpi import Mpi


@dataclass(frozen=True)
class Layout:
    mpi: str
    ranks_per_host: tuple

    @classmethod
    def parse(cls, text):
        mpi, _, counts = text.rpartition(":")
        try:
            layout = cls(mpi or "mpich", tuple(int(count) for count in counts.split("+")))
            Mpi.named(layout.mpi)
        except ValueError as error:
            raise ValueError(f"{text!r} is no layout of a job, as 2+2 or openmpi:3+1 are ({error})") from None
        return layout

    @classmethod
    def chosen(cls):
        """The layout that this run of the tests is to use; None: spawned processes."""
        text = os.environ.get("C10D_TEST_JOB")
        return cls.parse(text) if text else None

    def __str__(self):
        return ("" if self.mpi == "mpich" else f"{self.mpi}:") + "+".join(map(str, self.ranks_per_host))

    @property
    def world_size(self):
        return sum(self.ranks_per_host)

    def of(self, world_size):
        """This layout for another number of ranks: on as many of its hosts, as evenly as its shape allows."""
        counts = [0] * len(self.ranks_per_host)
        for _ in range(world_size):
            room = [i for i, most in enumerate(self.ranks_per_host) if counts[i] < most] or range(len(counts))
            counts[min(room, key=lambda i: counts[i])] += 1
        return Layout(self.mpi, tuple(counts))

    def why_not(self):
        """None where jobs of this layout can be run, else the reason."""
        return Mpi.named(self.mpi).why_not() or (Hosts.why_not() if len(self.ranks_per_host) > 1 else None)
