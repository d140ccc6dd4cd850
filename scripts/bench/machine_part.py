"""What ``scripts/bench machine`` times at one number of ranks, on each of them: one case after the other, the telling
ones first, until its time is over. Rank 0 writes each result as soon as it has it, a line of JSON: who is killed for
taking too long keeps those."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from c10d_custom.bench import ranks, raw_mpi, references
from c10d_custom.bench.case import Case, Unavailable
from c10d_custom.bench.operations import OPERATIONS
from c10d_custom.bench.timing import Plan, Timed, times

BARRIER = "barrier"
_ROUNDS = 3
_FEWEST = 4 + 3 * _ROUNDS  # calls of a reference, however slow it is: see timing.times
_PAGE = 4096
_MOST = 0.15  # s of a block, as in the sweep


@dataclass(frozen=True)
class Part:
    """``cases``: (operation, bytes) in the order in which they are timed. ``until``: of time.time(), when it ends."""

    ranks: int
    cases: tuple[tuple[str, int], ...]
    against: tuple[str, ...]
    until: float
    file: str


def main(text: str) -> int:
    """Runs a Part, as JSON: the ranks' start, or one of them under mpirun. Its exit status."""
    given = json.loads(text)
    part = Part(**{**given, "cases": tuple(map(tuple, given["cases"])), "against": tuple(given["against"])})
    return ranks.run(run, part.ranks, part)


def as_text(part: Part) -> str:
    return json.dumps(asdict(part))


class _Estimates:
    """How long one call of a reference will take, by what the next smaller size took: more in proportion, from a page
    up."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[int, float]] = {}

    def add(self, name: str, operation: str, nbytes: int, seconds: float) -> None:
        self._known.setdefault((name, operation), {})[nbytes] = seconds

    def of(self, name: str, operation: str, nbytes: int) -> float:
        known = self._known.get((name, operation), {})
        smaller = max((b for b in known if b <= nbytes), default=None)
        return 0.0 if smaller is None else known[smaller] * max(1.0, nbytes / max(_PAGE, smaller))


def _timed(name: str, reference: Any, operation: str, nbytes: int) -> Timed:
    """Raises Unavailable, alike on all ranks."""
    if operation == BARRIER:
        if name == "deepspeed":
            raise Unavailable("DeepSpeed's op is no barrier")
        return Timed(reference.barrier, reference.barrier, 1, True)
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, dtype = OPERATIONS[operation], torch.float32
    count = kind.split(max(1, nbytes // dtype.itemsize), size)
    case = Case(operation, count, dtype, "SUM" if operation == "all_reduce" else None, -1, False, rank, size)
    call = reference.bind(case, kind.make(case))
    return Timed(call, reference.barrier, reference.repeats(case), kind.takes_part(rank, size))


def run(part: Part) -> bool:
    """One rank's run; collective over the default group."""
    known, missing = references.make(part.against, 1)
    rank = dist.get_rank()
    with open(part.file if rank == 0 else "/dev/null", "a", buffering=1) as file:

        def say(what: dict[str, Any]) -> None:
            print(json.dumps({"ranks": part.ranks, **what}), file=file)

        say({"missing": missing, "mpi": raw_mpi.version()})
        estimates = _Estimates()
        for done, (operation, nbytes) in enumerate(part.cases):
            left = part.until - time.time()
            share = left / (len(part.cases) - done)
            fitting = [
                name
                for name in known
                if left > 0 and _FEWEST * estimates.of(name, operation, nbytes) <= max(2 * share, left / 4)
            ]
            decided: list[Any] = [fitting, share]
            dist.broadcast_object_list(decided, src=0)  # rank 0's clock counts
            fitting, share = decided
            timed = {}
            for name in fitting:
                try:
                    timed[name] = _timed(name, known[name], operation, nbytes)
                except Unavailable:
                    continue
            if out := [name for name in known if name not in fitting]:
                say({"operation": operation, "bytes": nbytes, "no_time": out})
            if not timed:
                continue
            block = min(_MOST, share / len(timed) / (_ROUNDS + 1))
            for name, seconds in times(timed, Plan(rounds=_ROUNDS, seconds=block)).items():
                middle = statistics.median(seconds)
                estimates.add(name, operation, nbytes, middle)
                result = {"reference": name, "calls": len(seconds), "min_us": min(seconds) * 1e6}
                say({"operation": operation, "bytes": nbytes, **result, "median_us": middle * 1e6})
    return False
