"""A failure between hosts, in numbers, on its way to the sentence that failure.py makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Trouble(Exception):
    """A failure in numbers: the fields of the native Failure, ranks being those of the group. ``missing``: those that
    whoever timed out had waited for, where it knows them."""

    status: int
    peer: int = -1
    by: int = -1
    cause: int = 0
    call: int = 0
    seq: int = 0
    elapsed_ns: int = 0
    expected: int = 0
    actual: int = 0
    expected_dtype: int = 0
    actual_dtype: int = 0
    missing: Sequence[int] = ()
    over: bool = False  # of a message that was over when it was refused: another call raises its error
