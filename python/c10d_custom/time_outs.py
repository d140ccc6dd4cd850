"""Time-outs as callers give them, of any length, in numbers that every clock and system call below takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta


LONGEST = 1e9  # s: 31 years stand for ever. In nanoseconds, and added to any clock, it still fits 63 bits


def seconds_of(timeout: timedelta) -> float:
    """Its seconds, but LONGEST for what is longer: also where torch has wrapped that around, as it does with
    timedelta.max, to less than any caller means."""
    seconds = timeout.total_seconds()
    return seconds if -LONGEST < seconds < LONGEST else LONGEST
