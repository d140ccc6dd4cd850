"""Outputs that share memory with inputs get what they would if the inputs were read first."""

import pytest
import torch
import torch.distributed as dist

from . import reference
from .cases import check

OPERATIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)


def _one_wide(me, size, count):
    """Where the side of one part lies in the memory of the wide side: places of parts, and between them."""
    return {
        "its own place": me * count,
        "beside its own": me * count + 1,
        "another's": (me + 1) % size * count,
        "across the last": (size - 1) * count + 1,
    }


def _both_wide(me, size, count):
    return {"the same": 0, "an element on": 1, "a part on": count}


def _call(name, wide, one, other, async_op):
    """``wide``: of a part for each rank; ``one``: the side of one part; ``other``: the other wide side of
    all_to_all."""
    parts = list(wide.chunk(dist.get_world_size()))
    root = dist.get_rank() == 0
    return {
        "all_gather": lambda: dist.all_gather(parts, one, async_op=async_op),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, one, async_op=async_op),
        "gather": lambda: dist.gather(one, parts if root else None, async_op=async_op),
        "scatter": lambda: dist.scatter(one, parts if root else None, async_op=async_op),
        "reduce_scatter": lambda: dist.reduce_scatter(one, parts, async_op=async_op),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, wide, async_op=async_op),
        "all_to_all": lambda: dist.all_to_all(list(other.chunk(dist.get_world_size())), parts, async_op=async_op),
        "all_to_all_single": lambda: dist.all_to_all_single(other, wide, async_op=async_op),
    }[name]()


def _overlaps(name, count, async_op):
    me, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    both = name.startswith("all_to_all")
    for what in (_both_wide if both else _one_wide)(me, size, count):

        def content(rank):
            return torch.arange((2 * size + 1) * count + 1) + rank * 10**9

        def at(rank):
            return (_both_wide if both else _one_wide)(rank, size, count)[what]

        def part(rank, i):
            """What the rank has in the i-th part of the wide side."""
            return content(rank)[i * count : (i + 1) * count]

        def single(rank):
            return content(rank)[at(rank) : at(rank) + count]

        memory = content(me)
        wide, one = memory[: size * count], memory[at(me) : at(me) + count]
        other = memory[at(me) : at(me) + size * count] if both else None
        work = _call(name, wide, one, other, async_op)
        if work is not None:
            work.wait()
        if name in ("all_gather", "all_gather_into_tensor") or name == "gather" and me == 0:
            pairs = [(wide, torch.cat([single(r) for r in range(size)]))]
        elif name == "scatter":
            pairs = [(one, part(0, me))]
        elif name.startswith("reduce_scatter"):
            pairs = [(one, sum(part(r, me) for r in range(size)))]
        elif both:
            pairs = [(other, torch.cat([part(r, me) for r in range(size)]))]
        else:
            pairs = [(memory, content(me))]
        wrong += [
            f"{what}: {difference}" for got, expected in pairs if (difference := reference.difference(got, expected))
        ]
    return wrong


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_overlaps(ranks, backend, name, async_op):
    if backend == "gloo":
        pytest.skip("gloo reads inputs after it has written outputs")
    for count in (5, 60000):
        check(ranks, _overlaps, name, count, async_op)
