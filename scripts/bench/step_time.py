"""What communication costs a DDP step: the step beside the same step without communication, for several groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 5  # steps timed in a row, before it is another kind's turn


@dataclass
class StepTime:
    """Milliseconds, medians. A step is as slow as its slowest rank."""

    step: float
    local: float  # the same under no_sync: forward, backward, optimizer, no communication
    spread: tuple[float, float]  # quartiles of step - local over the rounds
    rounds: int

    @property
    def comm(self) -> float:
        """Communication that the step does not hide behind its backward pass."""
        return max(self.step - self.local, 0.0)

    @property
    def share(self) -> float:
        return self.comm / self.step


def timed_block(run_step: Callable[[], object]) -> list[float]:
    dist.barrier()
    run_step()  # ranks leave a barrier unevenly, and the first step after a switch pays for cold caches
    times = []
    for _ in range(BLOCK):
        start = time.perf_counter()
        run_step()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def measure(
    groups: dict,
    make_stepper: Callable[[Any], tuple[Any, Callable[[], object]]],
    seconds: float,
    progress: Callable[[float], object],
    least: int = 1,
) -> dict[str, StepTime]:
    """Times for each named group. make_stepper(group) returns a DDP model and a function that runs one step on it.

    Everything runs in turns within one run, so that a machine that slows down slows all alike: ``least`` rounds at
    least, then until the time is over.
    """
    turns = []
    for group in groups.values():
        model, run_step = make_stepper(group)

        def local_step(model: Any = model, run_step: Callable[[], object] = run_step) -> None:
            with model.no_sync():
                run_step()

        turns += [run_step, local_step]
    for run_step in turns:
        timed_block(run_step)  # warm up; DDP rebuilds its buckets after its first step

    rounds: list[list[list[float]]] = []
    start = time.perf_counter()
    more = torch.ones(1)
    while more.item():
        times: list = [None] * len(turns)
        order = range(len(turns)) if len(rounds) % 2 else reversed(range(len(turns)))
        for turn in order:
            times[turn] = timed_block(turns[turn])
        rounds.append(times)
        elapsed = time.perf_counter() - start
        progress(min(elapsed, seconds))
        more.fill_(elapsed < seconds or len(rounds) < least)
        dist.broadcast(more, src=0)  # one clock decides, or the ranks would disagree on the last round

    slowest = torch.tensor(rounds, dtype=torch.float64)  # round, turn, step
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    medians = slowest.transpose(0, 1).flatten(1).median(dim=1).values
    by_round = slowest.median(dim=2).values
    result = {}
    for i, name in enumerate(groups):
        difference = by_round[:, 2 * i] - by_round[:, 2 * i + 1]
        low, high = torch.quantile(difference, torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
        result[name] = StepTime(medians[2 * i].item(), medians[2 * i + 1].item(), (low, high), len(rounds))
    return result
