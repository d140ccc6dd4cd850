"""The operations the benchmark times: their buffers, what they must give, and how many bytes their bus carries.

How one is called is the matter of what is timed (references.py). busbw is nccl-tests' (its doc/PERFORMANCE.md):
algbw times the factor that makes the figure comparable with the speed of the hardware whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..call import SHAPES, Op
from .values import Values, differing, overwrite, zeros

if TYPE_CHECKING:
    from .case import Case


@dataclass(frozen=True)
class Buffers:
    """One rank's tensors for one operation; ``source`` and ``target`` are one tensor where it works in place,
    and None where this rank gives or gets nothing."""

    source: torch.Tensor | None
    target: torch.Tensor | None
    given: Callable[[], torch.Tensor]  # what source holds before a checked call
    expected: Callable[[], torch.Tensor | None]  # what target must hold after it; None where that is not defined

    def clear(self) -> None:
        """Timed calls move zeros: repeated in-place sums would overflow."""
        for t in (self.source, self.target):
            if t is not None:
                t.view(torch.uint8).zero_()

    def fill(self) -> None:
        if self.target is not None:
            overwrite(self.target)
        if self.source is not None:
            self.source.copy_(self.given())

    def wrong(self) -> int:
        """How many elements of target are not what they must be."""
        expected = None if self.target is None else self.expected()
        return 0 if self.target is None or expected is None else differing(self.target, expected)


@dataclass(frozen=True)
class Operation:
    """``make(case)`` gives the Buffers of this rank, ``bus_factor(ranks)`` turns algbw into busbw; ``takes_part(rank,
    ranks)`` is false for a rank that does nothing. The size column is the bytes of the largest buffer."""

    make: Callable[[Case], Buffers]
    bus_factor: Callable[[int], float]
    takes_part: Callable[[int, int], bool] = lambda rank, ranks: True

    def split(self, count: int, ranks: int) -> int:
        """``count`` rounded to what can be cut into equal parts, at least one element each."""
        return max(1, count // ranks) * ranks if self.make is _in_parts else count


def _in_place(c: Case) -> Buffers:
    """Of an operation whose tensor is its input and its output."""
    t, v = zeros(c.count, c.dtype), Values(c.dtype, c.redop, c.size)

    def expected() -> torch.Tensor | None:
        if c.operation == "send_recv":  # there and back
            return v.of(0 if c.rank == c.size - 1 else c.rank, c.count)
        if c.operation == "broadcast":
            return v.of(c.root, c.count)
        return v.reduced(c.count) if c.root in (-1, c.rank) else None

    return Buffers(t, t, lambda: v.of(c.rank, c.count), expected)


def _token(c: Case) -> Buffers:
    """Of rank 0's source, which goes around all targets."""
    v = Values(c.dtype, c.redop, c.size)
    return Buffers(
        zeros(c.count, c.dtype), zeros(c.count, c.dtype), lambda: v.of(c.rank, c.count), lambda: v.of(0, c.count)
    )


def _in_parts(c: Case) -> Buffers:
    """Of an operation whose input or output has a part for each rank."""
    shape, v, each = SHAPES[Op[c.operation]], Values(c.dtype, c.redop, c.size), c.count // c.size
    inputs, outputs = (c.count if whole else each for whole in (shape.from_each, shape.to_each))
    elsewhere = shape.rooted and c.rank != c.root
    first = c.rank * each if shape.from_each else 0  # of what comes to this rank, in each rank's input

    def expected() -> torch.Tensor:
        if shape.reduces:
            return v.reduced(each, first)
        return torch.cat([v.of(r, each, first) for r in (range(c.size) if shape.to_each else (c.root,))])

    return Buffers(
        None if elsewhere and shape.from_each else zeros(inputs, c.dtype),
        None if elsewhere and shape.to_each else zeros(outputs, c.dtype),
        lambda: v.of(c.rank, inputs),
        expected,
    )


def _parts(n: int) -> float:
    return (n - 1) / n


OPERATIONS = {
    "all_reduce": Operation(_in_place, lambda n: 2 * _parts(n)),
    "broadcast": Operation(_in_place, lambda n: 1),
    "reduce": Operation(_in_place, lambda n: 1),
    "all_gather": Operation(_in_parts, _parts),
    "reduce_scatter": Operation(_in_parts, _parts),
    "all_to_all": Operation(_in_parts, _parts),
    "gather": Operation(_in_parts, _parts),
    "scatter": Operation(_in_parts, _parts),
    # There and back between the first rank and the last: other hosts' where there are several.
    "send_recv": Operation(_in_place, lambda n: 2, lambda rank, ranks: rank in (0, ranks - 1)),
}
# With what "all" leaves out.
KNOWN = {**OPERATIONS, "windows": Operation(_token, lambda n: n)}
