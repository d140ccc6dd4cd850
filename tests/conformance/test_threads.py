"""Ranks with several threads each: the bits are those of one thread, whatever moves or reduces them."""

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from c10d_custom.c10d import meeting

from . import values
from .cases import check

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.uint8)


@contextmanager
def threads(count):
    """Groups that are made meanwhile have so many."""
    os.environ["C10D_CUSTOM_THREADS"] = str(count)
    meeting.configuration.cache_clear()
    try:
        yield
    finally:
        del os.environ["C10D_CUSTOM_THREADS"]
        meeting.configuration.cache_clear()


def _results(group, dtype, count):
    me, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(me)
    bits = torch.randint(0, 256, (count * size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    mine = bits.view(dtype) if dtype is torch.uint8 else torch.rand(count * size, generator=generator).to(dtype)
    results = {}

    def keep(name, tensor):
        results[name] = values.raw(tensor).clone()

    for name, call in {
        "all_reduce": lambda t: dist.all_reduce(t, group=group),
        "reduce": lambda t: dist.reduce(t, size - 1, group=group),
        "broadcast": lambda t: dist.broadcast(t, 1, group=group),
    }.items():
        call(tensor := mine.clone())
        if name != "reduce" or me == size - 1:
            keep(name, tensor)
    part, whole = torch.zeros_like(mine[:count]), torch.zeros_like(mine)
    dist.reduce_scatter_tensor(part, mine, group=group)
    keep("reduce_scatter", part)
    dist.all_gather_into_tensor(whole, mine[:count].contiguous(), group=group)
    keep("all_gather", whole)
    dist.all_to_all_single(whole, mine, group=group)
    keep("all_to_all", whole)
    parts = list(whole.zero_().chunk(size)) if me == 0 else None
    dist.gather(mine[:count].contiguous(), parts, 0, group=group)
    keep("gather", whole)
    dist.scatter(part, list(mine.chunk(size)) if me == 0 else None, 0, group=group)
    keep("scatter", part)
    return results


def _differing(count):
    groups = {1: dist.new_group()}
    for number in (2, 4):
        with threads(number):
            groups[number] = dist.new_group()
    wrong = []
    for dtype in DTYPES if dist.get_world_size() < 8 else DTYPES[:2]:  # 8 ranks of 4 threads take their time
        alone = None
        for number, group in groups.items():
            results = _results(group, dtype, count)
            alone = alone or results
            wrong += [
                f"{name} of {dtype} with {number} threads"
                for name, bits in results.items()
                if not values.same_bytes(bits, alone[name])
            ]
    for group in groups.values():
        dist.destroy_process_group(group)
    return wrong


@pytest.mark.parametrize("count", [300007, 1 << 19])
def test_bits_are_those_of_one_thread(ranks, backend, count, full):
    if backend == "gloo":
        pytest.skip("gloo has no such setting")
    if ranks.world_size == 8 and count == 1 << 19 and not full:
        pytest.skip("only with --full: 8 ranks of 4 threads take their time")
    check(ranks, _differing, count)
