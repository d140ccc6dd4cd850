"""One case of a collective, and the loop that runs many of them inside a rank.

A collective's test file gives a function perform(case, group) that calls it once and yields
(what, Placed or tensor, expected tensor). run_cases reports every case that raised or whose bits differ.
"""

import dataclasses
import functools
import inspect
import itertools
import time
import traceback

import torch
import torch.distributed as dist

from harness import join_by_rank

from . import reference, values
from .digests import Digest
from .strides import Placed, blank


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    count: int  # elements of one rank's contribution
    op: str | None = None  # None: a collective that only moves data
    kind: str = "bits"
    layout: str = "contiguous"
    members: str = "world"  # or "unsorted": some ranks, in an order of their own
    async_op: bool = False
    root: int = 0  # position in the group, modulo its size

    def __str__(self):
        what = f"{self.op} of {self.kind} " if self.op else ""
        return (
            f"{what}{str(self.dtype)[6:]}[{self.count}] {self.layout}, {self.members}, "
            f"{'async' if self.async_op else 'sync'}, root {self.root}"
        )

    def reduce_op(self):
        return values.reduce_op(self.op, self.kind)


# Arguments of new_group that leave the ranks in the order given; torch 2.11 sorts them always.
AS_GIVEN = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


def members_of(members, world_size):
    """Global ranks, in the order of their positions in the group."""
    if members == "world":
        return tuple(range(world_size))
    ranks = {1: (0,), 2: (1, 0), 3: (2, 0), 4: (3, 0, 2), 8: (5, 2, 7, 0)}[world_size]
    return ranks if AS_GIVEN else tuple(sorted(ranks))


class Group:
    """A process group as the cases see it. `ranks[i]` is the global rank at position i; `device`: where its tensors
    are."""

    def __init__(self, pg, ranks, device="cpu"):
        self.pg, self.ranks, self.size, self.device = pg, ranks, len(ranks), device
        self.me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None

    def on(self, device):
        return Group(self.pg, self.ranks, device)

    def input(self, case, position=None, count=None, start=0):
        """What the rank at a position puts in (elements start .. start + count), as a plain tensor."""
        rank = self.ranks[self.me if position is None else position]
        return values.inputs(case.dtype, rank, case.kind, case.op, case.count if count is None else count, start)

    def placed_input(self, case, count=None, start=0):
        return Placed(self.input(case, None, count, start), case.layout, self.me, self.device)

    def output(self, case, count=None):
        return blank(case.dtype, case.count if count is None else count, case.layout, self.me, self.device)

    def reduced(self, case, count=None, start=0):
        return reference.reduced(
            case.dtype, case.op, self.ranks, case.kind, case.count if count is None else count, start
        )

    def root(self, case):
        return self.ranks[case.root % self.size]


@functools.cache
def group(members="world"):
    """Made by all ranks at once, also those outside it; kept for as long as the process lives."""
    ranks = members_of(members, dist.get_world_size())
    if members == "world":
        return Group(dist.group.WORLD, ranks)
    return Group(dist.new_group(list(ranks), **AS_GIVEN), ranks)


def finish(work, case):
    """Async calls give a Work, sync calls nothing."""
    if case.async_op:
        assert work is not None, "async_op=True returned no Work"
        work.wait()
    else:
        assert work is None, f"async_op=False returned {work!r}"


def uneven_count(case, position):
    """Elements of the part of the rank at a position, where parts differ."""
    return case.count // 2 if position % 2 else case.count + 7 * position


def run_cases(perform, cases, device="cpu"):
    """Runs in each rank, on tensors of this device. Returns what was wrong; raises only at the end, when some case
    raised."""
    wrong, raised, digest = [], [], Digest(perform, cases)
    for name in sorted({case.members for case in cases}):
        group(name)
    for case in cases:
        g = group(case.members).on(device)
        if g.me is None:
            continue
        try:
            for what, got, want in perform(case, g):
                placed, got = (got, got.read()) if isinstance(got, Placed) else (None, got.cpu())
                digest.add(got)
                problem = reference.difference(got, want) or (placed and placed.stray_write())
                if problem:
                    wrong.append(f"{case}: {what}: {problem}")
        except Exception:
            error = traceback.format_exc(limit=-4) if not raised else traceback.format_exc(limit=0).splitlines()[-1]
            raised.append(f"{case}: raised {error}")
    digest.close()
    if raised:
        raise CasesRaised(_summary(raised + wrong))
    return wrong


_signals = itertools.count()


class Signal:
    """Lets one rank tell the others how far it is, past the backend. To be made by all ranks alike."""

    def __init__(self):
        self._key, self._store = f"signal/{next(_signals)}", dist.distributed_c10d._get_default_store()

    def give(self):
        self._store.add(self._key, 1)

    def given(self):
        """How often."""
        return self._store.add(self._key, 0)

    def wait(self, times=1):
        deadline = time.monotonic() + 30
        while self.given() < times:
            assert time.monotonic() < deadline, f"signal given {self.given()} times of {times}"
            time.sleep(0.002)


class CasesRaised(Exception):
    """Calls that should have worked raised: the group may be out of step."""


def _summary(problems, limit=12):
    text = "\n".join(problems[:limit])
    return text if len(problems) <= limit else f"{text}\n... and {len(problems) - limit} more"


def check(ranks, function, *args, timeout=None):
    """Run a function that returns a list of what was wrong, on every rank; fail with all of it."""
    found = ranks.run(function, *args, timeout=timeout)
    by_rank = {rank: _summary(problems) for rank, problems in enumerate(found) if problems}
    assert not by_rank, f"{ranks.world_size} ranks, backend {ranks.backend}:\n" + join_by_rank(by_rank)
