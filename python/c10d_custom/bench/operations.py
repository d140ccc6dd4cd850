"""The operations the benchmark times: their buffers, what they must give, and how many bytes their bus carries.

How one is called is the matter of what is timed (references.py). busbw is nccl-tests' (its doc/PERFORMANCE.md):
algbw times the factor that makes the figure comparable with the speed of the hardware whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

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
        return max(1, count // ranks) * ranks if self.make in _CUT else count


def _values(c: Case) -> Values:
    return Values(c.dtype, c.redop, c.size)


def _all_reduce(c: Case) -> Buffers:
    t, v = zeros(c.count, c.dtype), _values(c)
    return Buffers(t, t, lambda: v.of(c.rank, c.count), lambda: v.reduced(c.count))


def _reduce(c: Case) -> Buffers:
    t, v = zeros(c.count, c.dtype), _values(c)
    return Buffers(t, t, lambda: v.of(c.rank, c.count), lambda: v.reduced(c.count) if c.rank == c.root else None)


def _broadcast(c: Case) -> Buffers:
    t, v = zeros(c.count, c.dtype), _values(c)
    return Buffers(t, t, lambda: v.of(c.rank, c.count), lambda: v.of(c.root, c.count))


def _all_gather(c: Case) -> Buffers:
    each, v = c.count // c.size, _values(c)
    return Buffers(
        zeros(each, c.dtype),
        zeros(c.count, c.dtype),
        lambda: v.of(c.rank, each),
        lambda: torch.cat([v.of(r, each) for r in range(c.size)]),
    )


def _reduce_scatter(c: Case) -> Buffers:
    each, v = c.count // c.size, _values(c)
    return Buffers(
        zeros(c.count, c.dtype),
        zeros(each, c.dtype),
        lambda: v.of(c.rank, c.count),
        lambda: v.reduced(each, c.rank * each),
    )


def _all_to_all(c: Case) -> Buffers:
    each, v = c.count // c.size, _values(c)
    return Buffers(
        zeros(c.count, c.dtype),
        zeros(c.count, c.dtype),
        lambda: v.of(c.rank, c.count),
        lambda: torch.cat([v.of(r, each, c.rank * each) for r in range(c.size)]),
    )


def _gather(c: Case) -> Buffers:
    each, v = c.count // c.size, _values(c)
    return Buffers(
        zeros(each, c.dtype),
        zeros(c.count, c.dtype) if c.rank == c.root else None,
        lambda: v.of(c.rank, each),
        lambda: torch.cat([v.of(r, each) for r in range(c.size)]),
    )


def _scatter(c: Case) -> Buffers:
    each, v = c.count // c.size, _values(c)
    return Buffers(
        zeros(c.count, c.dtype) if c.rank == c.root else None,
        zeros(each, c.dtype),
        lambda: v.of(c.root, c.count),
        lambda: v.of(c.root, each, c.rank * each),
    )


def _send_recv(c: Case) -> Buffers:
    t, v = zeros(c.count, c.dtype), _values(c)
    whose = 0 if c.rank == c.size - 1 else c.rank
    return Buffers(t, t, lambda: v.of(c.rank, c.count), lambda: v.of(whose, c.count))


_CUT = {_all_gather, _reduce_scatter, _all_to_all, _gather, _scatter}


def _parts(n: int) -> float:
    return (n - 1) / n


OPERATIONS = {
    "all_reduce": Operation(_all_reduce, lambda n: 2 * _parts(n)),
    "broadcast": Operation(_broadcast, lambda n: 1),
    "reduce": Operation(_reduce, lambda n: 1),
    "all_gather": Operation(_all_gather, _parts),
    "reduce_scatter": Operation(_reduce_scatter, _parts),
    "all_to_all": Operation(_all_to_all, _parts),
    "gather": Operation(_gather, _parts),
    "scatter": Operation(_scatter, _parts),
    # There and back between the first rank and the last: other hosts' where there are several.
    "send_recv": Operation(_send_recv, lambda n: 2, lambda rank, ranks: rank in (0, ranks - 1)),
}
