"""How calls are timed, and what of the times is told.

*single*: one call and the wait for the GPU, by the host's clock: what somebody sees who needs the result. *row*: calls
one after the other with no wait between, by CUDA events around all of them: what a stream full of work pays. A figure
is the median of a rank's times, and of these the slowest rank's."""

import math
import statistics
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of one rank's calls in one block."""

    single: list
    row: float


@dataclass(frozen=True)
class Figure:
    """Seconds: of the slowest rank."""

    single: float
    row: float
    worst: float  # 90th percentile of the single calls
    calls: int

    def as_json(self):
        return {
            "single_us": self.single * 1e6,
            "row_us": self.row * 1e6,
            "p90_us": self.worst * 1e6,
            "calls": self.calls,
        }


def take(call, device, calls):
    """Times of a block of calls."""
    single = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        device.synchronize()
        single.append(time.perf_counter() - began)
    first = device.event()
    for _ in range(calls):
        call()
    last = device.event()
    device.synchronize()
    return Times(single, device.elapsed(first, last) / calls)


def figure(blocks):
    """``blocks``: for each block, the Times of every rank."""
    by_rank = list(zip(*blocks, strict=True))
    singles = [[t for block in blocks_of_rank for t in block.single] for blocks_of_rank in by_rank]
    rows = [statistics.median(block.row for block in blocks_of_rank) for blocks_of_rank in by_rank]
    return Figure(
        max(map(statistics.median, singles)),
        max(rows),
        max(percentile(s, 0.9) for s in singles),
        min(map(len, singles)),
    )


def percentile(values, share):
    """The smallest value that so large a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def calls_for(seconds_each, block_seconds, most=200):
    """How many calls make a block of about so long; a block has the single calls and as many in a row."""
    return max(2, min(most, int(block_seconds / 2 / max(seconds_each, 1e-7))))
