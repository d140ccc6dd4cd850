"""Collectives of ranks that share a GPU: small ones through host memory, larger ones through the GPU's.

A GPU runs the kernels of one process at a time, and the processes take turns (but for MPS, which runs them side by
side). So a step of kernels is over when every rank has had its turn, however little it does. Copies between host and
GPU take no turns: other engines make them. docs/results has what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...call import ANY_COUNT, SHAPES

if TYPE_CHECKING:
    from ...call import Call
    from ..base import LocalTransport
    from .shared import SharedCollectives
    from .staged import StagedCollectives


class CollectivesBySize:
    """``limit``: the most bytes of a call, of a rank's inputs or its outputs, that go through host memory; alike on
    all ranks. One collective at a time."""

    def __init__(self, cpu: LocalTransport, staged: StagedCollectives, shared: SharedCollectives, limit: int) -> None:
        self._cpu, self._staged, self._shared, self._limit = cpu, staged, shared, limit

    def run(self, call: Call, left: Callable[[], float]) -> None:
        """As StagedCollectives.run or SharedCollectives.run."""
        through_host = self._shared.in_place_for(call) is None and self._bytes(call, left) <= self._limit
        (self._staged if through_host else self._shared).run(call, left)

    def _bytes(self, call: Call, left: Callable[[], float]) -> int:
        """Alike on all ranks, if they call alike."""
        if call.count == ANY_COUNT:  # then a rank knows its own sizes only
            sizes = self._cpu.agree(call, left()).sizes
            return max((sum(side) for of_rank in sizes or () for side in of_rank), default=0)
        shape = SHAPES[call.op]
        parts = self._cpu.size if shape.from_each or shape.to_each else 1
        return parts * call.count * call.dtype.item_bytes

    def let_go(self) -> None:
        self._shared.let_go()

    def close(self) -> None:
        """The stream is idle."""
        self._staged.close()
        self._shared.close()
