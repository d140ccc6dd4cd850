"""How calls are timed (statistics: sweep.py): references take turns, by blocks of calls or call by call, so that what
else the machine does hits all alike. Every rank times each of its calls; the ranks' times of one call are then made
one.

In a block calls follow one another, as in a training step; before every call of call-by-call timing there is a
barrier, and the caches hold what the other references left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

AVERAGES = ("rank0", "mean", "min", "max")


@dataclass(frozen=True)
class Plan:
    """How much is timed, and in what turns. ``average``: one of AVERAGES, what the ranks' times of a call become."""

    by_call: bool = False
    rounds: int = 5
    seconds: float = 0.15  # of one block, about
    calls: int | None = None  # of each reference in all; None: what fits the seconds
    warmup: int = 1  # untimed calls before each block
    average: str = "mean"


@dataclass(frozen=True)
class Timed:
    """One reference bound to its buffers: ``call`` does the operation ``repeats`` times. ``part``: whether this rank
    takes part, else its times say nothing."""

    call: Callable[[], object]
    barrier: Callable[[], object]
    repeats: int
    part: bool


def _calls_in_a_block(timed: Timed, plan: Plan) -> int:
    """Returns how many calls a block has. Rank 0 decides for all ranks."""
    if plan.calls is not None:
        return -(-plan.calls // plan.rounds)
    timed.call()
    timed.barrier()
    started = time.perf_counter()
    for _ in range(3):
        timed.call()
    timed.barrier()
    each = (time.perf_counter() - started) / 3
    count = torch.tensor([max(2, min(2000, int(plan.seconds / max(each, 1e-7))))])
    dist.broadcast(count, src=0)
    return int(count)


def _block(timed: Timed, count: int, warmup: int, times: list[float]) -> None:
    call, clock = timed.call, time.perf_counter
    for _ in range(warmup):
        call()
    timed.barrier()
    for _ in range(count):
        started = clock()
        call()
        times.append(clock() - started)
    timed.barrier()


def _in_blocks(all_timed: dict[str, Timed], counts: dict[str, int], plan: Plan) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in all_timed}
    for _ in range(plan.rounds):
        for name, timed in all_timed.items():
            _block(timed, counts[name], plan.warmup, times[name])
    return times


def _call_by_call(all_timed: dict[str, Timed], counts: dict[str, int], plan: Plan) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in all_timed}
    for timed in all_timed.values():
        for _ in range(plan.warmup):
            timed.call()
        timed.barrier()
    # As many of each: the slowest says how many fit.
    for _ in range(plan.rounds * min(counts.values())):
        for name, timed in all_timed.items():
            timed.barrier()
            started = time.perf_counter()
            timed.call()
            times[name].append(time.perf_counter() - started)
    return times


def _made_one(times: list[float], timed: Timed, how: str) -> list[float]:
    """Seconds of each call, from all ranks' seconds; on every rank. A call is one on all of those that take part."""
    mine = torch.tensor(times, dtype=torch.float64) / timed.repeats
    if how == "rank0":
        dist.broadcast(mine, src=0)
        return mine.tolist()
    out_of_the_way = {"mean": 0.0, "min": float("inf"), "max": 0.0}[how]
    values = mine if timed.part else torch.full_like(mine, out_of_the_way)
    dist.all_reduce(values, getattr(dist.ReduceOp, {"mean": "SUM"}.get(how, how.upper())))
    if how == "mean":
        parts = torch.tensor([float(timed.part)])
        dist.all_reduce(parts)
        values /= parts.item()
    return values.tolist()


def times(all_timed: dict[str, Timed], plan: Plan) -> dict[str, list[float]]:
    """{reference: [seconds of a call, ...]} for {reference: Timed}."""
    counts = {name: _calls_in_a_block(timed, plan) for name, timed in all_timed.items()}
    mine = (_call_by_call if plan.by_call else _in_blocks)(all_timed, counts, plan)
    return {name: _made_one(t, all_timed[name], plan.average) for name, t in mine.items()}
