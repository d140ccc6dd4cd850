"""Buffers that the caches cannot hold, where data is copied past them, at odd addresses."""

import functools

import pytest
import torch
import torch.distributed as dist

from . import reference
from .cases import check

OPERATIONS = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "send_recv")
_BYTES = 48 << 20  # of all ranks' buffers at the least: more than half of the caches of most processors
_AROUND = 77


@functools.cache
def _tiles():
    return torch.arange(251, dtype=torch.uint8).repeat(2 * _BYTES // 251)


def _content(rank, start, count):
    """Bytes that tell ranks and places apart."""
    at = (start + rank * 101) % 251
    return _tiles()[at : at + count]


def _large(name):
    me, size = dist.get_rank(), dist.get_world_size()
    each = _BYTES // size // (size if name in ("all_gather", "all_to_all") else 1) + 13

    def room(count):
        memory = torch.full((count + 2 * _AROUND,), 7, dtype=torch.uint8)
        return memory, memory[_AROUND:-_AROUND]

    mine = _content(me, 0, each)
    if name == "broadcast":
        memory, output = room(each)
        output.copy_(mine)
        dist.broadcast(output, 1)
        want = _content(1, 0, each)
    elif name == "all_gather":
        memory, output = room(each * size)
        dist.all_gather(list(output.chunk(size)), mine)
        want = torch.cat([_content(r, 0, each) for r in range(size)])
    elif name == "gather":
        memory, output = room(each * size if me == 0 else 0)
        dist.gather(mine, list(output.chunk(size)) if me == 0 else None)
        want = torch.cat([_content(r, 0, each) for r in range(size)]) if me == 0 else output.clone()
    elif name == "scatter":
        memory, output = room(each)
        parts = [_content(0, r * each, each) for r in range(size)]
        dist.scatter(output, parts if me == 0 else None)
        want = parts[me]
    elif name == "all_to_all":
        memory, output = room(each * size)
        dist.all_to_all(list(output.chunk(size)), [_content(me, r * each, each) for r in range(size)])
        want = torch.cat([_content(r, me * each, each) for r in range(size)])
    else:
        memory, output = room(each)
        work = dist.isend(mine, (me + 1) % size)
        dist.recv(output, (me - 1) % size)
        work.wait()
        want = _content((me - 1) % size, 0, each)
    around = torch.cat([memory[:_AROUND], memory[-_AROUND:]])
    if not torch.equal(around, torch.full_like(around, 7)):
        return ["memory around the output was written"]
    difference = reference.difference(output, want)
    return [difference] if difference else []


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_large(ranks, name):
    check(ranks, _large, name)
