"""What large asynchronous all_reduces cost the program's own threads: a loop of matmuls, with as many threads as there
are cores for the ranks, alone and beside 16 all_reduces, of ranks with one thread each and with as many as they have by
default (C10D_CUSTOM_THREADS)."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from c10d_custom.bench import environment, references

_CALLS, _BYTES = 16, 4 << 20
_MATMULS, _WIDTH = 8, 512  # of a turn
_ALONE, _ONE, _DEFAULT = "alone", "threads1", "custom"


@dataclass(frozen=True)
class Beside:
    rounds: int
    json: str | None


def _turn(group: Any, tensors: list[torch.Tensor], multiply: Callable[[], object]) -> float:
    """Seconds that the matmuls took, which begin when the all_reduces have been issued; None as a group: there are
    none."""
    dist.barrier()
    works = [] if group is None else [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    began = time.perf_counter()
    for _ in range(_MATMULS):
        multiply()
    took = time.perf_counter() - began
    for work in works:
        work.wait()
    return took


def run(what: Beside) -> bool:
    """One rank's run; collective over the default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // size))
    made, _ = references.make((_ONE,), 1)
    groups: dict[str, Any] = {_ALONE: None, _ONE: made[_ONE], _DEFAULT: made["custom"]}
    a, b, c = (torch.ones(_WIDTH, _WIDTH) for _ in range(3))
    tensors = [torch.zeros(_BYTES // 4) for _ in range(_CALLS)]
    took: dict[str, list[float]] = {name: [] for name in groups}
    for round in range(what.rounds + 1):
        for name in groups if round % 2 else reversed(groups):
            group = groups[name] and groups[name].group
            seconds = _turn(group, tensors, lambda: torch.mm(a, b, out=c))
            every: list[Any] = [None] * size
            dist.all_gather_object(every, seconds)
            if round:  # the first is untimed
                took[name].append(max(every))
    middle = {name: statistics.median(seconds) for name, seconds in took.items()}
    if rank == 0:
        print(
            f"{size} ranks on {cores} cores, {torch.get_num_threads()} threads for the matmuls of each; "
            f"{_CALLS} all_reduces of {_BYTES >> 20} MiB under way"
        )
        for name, seconds in middle.items():
            print(f"{name:>9}: {_MATMULS} matmuls in {seconds * 1e3:8.2f} ms, {seconds / middle[_ALONE]:.3f} of alone")
        print(f"threads by default cost them {100 * (middle[_DEFAULT] / middle[_ONE] - 1):+.1f} % (at most 3 wanted)")
        if what.json:
            with open(what.json, "w") as f:
                json.dump({**environment.about(), "ranks": size, "seconds": took}, f, indent=1)
    return False
