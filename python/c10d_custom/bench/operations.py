"""The operations the benchmark times: their buffers, what they must give, and how many bytes their bus carries.

How one is called is the matter of what is timed (references.py). busbw is nccl-tests' (its doc/PERFORMANCE.md):
algbw times the factor that makes the figure comparable with the speed of the hardware whatever the number of ranks.
"""
from dataclasses import dataclass
from typing import Callable

import torch

_PERIOD = 11


def _values(count, of_ranks, first=0):
    """Elements ``first`` to ``first + count`` of the check's input, summed over ``of_ranks``: small integers,
    so that float32 sums are exact in any order; they differ from rank to rank and between neighbours."""
    one = torch.zeros(_PERIOD)
    for rank in of_ranks:
        one += (torch.arange(_PERIOD) + 3 * rank) % _PERIOD + 1
    first %= _PERIOD
    return one.repeat((first + count) // _PERIOD + 1)[first:first + count]


@dataclass(frozen=True)
class Buffers:
    """One rank's tensors for one operation; ``source`` and ``target`` are one tensor where it works in place,
    and None where this rank gives or gets nothing."""
    source: torch.Tensor | None
    target: torch.Tensor | None
    given: Callable  # () -> what source holds before a checked call
    expected: Callable  # () -> what target must hold after it

    def clear(self):
        """Timed calls move zeros: repeated in-place sums would overflow."""
        for t in (self.source, self.target):
            if t is not None:
                t.zero_()

    def fill(self):
        if self.target is not None:
            self.target.fill_(-1)
        if self.source is not None:
            self.source.copy_(self.given())

    def wrong(self):
        """How many elements of target are not what they must be."""
        return 0 if self.target is None else int((self.target != self.expected()).sum())


@dataclass(frozen=True)
class Operation:
    """``make(count, rank, size)`` gives the Buffers of one operation on ``count`` float32 elements, ``bus_factor(size)``
    turns algbw into busbw. The size column is the bytes of the largest buffer."""
    make: Callable
    bus_factor: Callable


def _in_place(expected_on):
    """One tensor of ``count`` elements; ``expected_on(rank, size)`` names the ranks whose values sum up in it
    (None: its content afterwards is not defined)."""
    def make(count, rank, size):
        t, ranks = torch.zeros(count), expected_on(rank, size)
        return Buffers(t, t, lambda: _values(count, [rank]), lambda: t if ranks is None else _values(count, ranks))
    return make


def _all_gather(count, rank, size):
    each = max(1, count // size)
    return Buffers(torch.zeros(each), torch.zeros(each * size), lambda: _values(each, [rank]),
                   lambda: torch.cat([_values(each, [r]) for r in range(size)]))


def _reduce_scatter(count, rank, size):
    each = max(1, count // size)
    return Buffers(torch.zeros(each * size), torch.zeros(each), lambda: _values(each * size, [rank]),
                   lambda: _values(each, range(size), rank * each))


def _all_to_all(count, rank, size):
    each = max(1, count // size)
    return Buffers(torch.zeros(each * size), torch.zeros(each * size), lambda: _values(each * size, [rank]),
                   lambda: torch.cat([_values(each, [r], rank * each) for r in range(size)]))


def _gather(count, rank, size):
    each = max(1, count // size)
    return Buffers(torch.zeros(each), torch.zeros(each * size) if rank == 0 else None, lambda: _values(each, [rank]),
                   lambda: torch.cat([_values(each, [r]) for r in range(size)]))


def _scatter(count, rank, size):
    each = max(1, count // size)
    return Buffers(torch.zeros(each * size) if rank == 0 else None, torch.zeros(each),
                   lambda: _values(each * size, [0]), lambda: _values(each, [0], rank * each))


def _twice(size):
    return 2 * (size - 1) / size


def _rooted(size):
    return (size - 1) / size


def _every(rank, size):
    return range(size)


OPERATIONS = {
    "all_reduce": Operation(_in_place(_every), _twice),
    "all_reduce_async": Operation(_in_place(_every), _twice),
    "broadcast": Operation(_in_place(lambda rank, size: [0]), lambda n: 1),
    "reduce": Operation(_in_place(lambda rank, size: None if rank else range(size)), lambda n: 1),
    "all_gather": Operation(_all_gather, _rooted),
    "reduce_scatter": Operation(_reduce_scatter, _rooted),
    "all_to_all": Operation(_all_to_all, _rooted),
    "gather": Operation(_gather, _rooted),
    "scatter": Operation(_scatter, _rooted),
    # Half a round trip each way between the first rank and the last: other hosts' where there are several.
    "send_recv": Operation(_in_place(lambda rank, size: [0] if rank == size - 1 else [rank]), lambda n: 2),
}
