"""The memory floor: all ranks copy the size's bytes, once, at the same time, from one private buffer to another.

No collective whose ranks each read and write so many bytes can take less where memory is what limits it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from .values import zeros

if TYPE_CHECKING:
    from .case import Case
    from .operations import Buffers


_BYTES = 64 << 20  # copied between two barriers, at least: their cost must not count


class Floor:
    checked = False

    def __init__(self, barrier: Callable[[], object]) -> None:
        self.barrier = barrier

    def repeats(self, case: Case) -> int:
        """Copies in one call of the function; its time is divided by it. Ranks that outnumber the cores take turns, and
        only a barrier at the end shows how long all of them took."""
        return max(1, min(64, _BYTES // case.nbytes))

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], None]:
        source, target = zeros(case.count, case.dtype), zeros(case.count, case.dtype)
        to, of, size, times, barrier = (
            target.data_ptr(),
            source.data_ptr(),
            case.nbytes,
            self.repeats(case),
            self.barrier,
        )

        def copies(keep: object = (source, target)) -> None:
            for _ in range(times):
                ctypes.memmove(to, of, size)
            barrier()

        return copies
