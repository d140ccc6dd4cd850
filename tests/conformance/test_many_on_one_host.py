"""Groups of many ranks on one host, which go by a combining tree and share sums out: small sizes, and one rank that
calls something else."""

import re

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveMismatchError
from harness import Layout
from harness.pool import RankPool

from .cases import Case, check, run_cases
from .selection import time_for
from .test_all_gather import all_gather, all_gather_uneven
from .test_all_reduce import all_reduce
from .test_all_to_all import all_to_all
from .test_broadcast import broadcast
from .test_gather import gather
from .test_reduce import reduce
from .test_reduce_scatter import reduce_scatter
from .test_scatter import scatter

MOVING = (broadcast, all_gather, all_gather_uneven, all_to_all, gather, scatter)
REDUCING = (all_reduce, reduce, reduce_scatter)
# Elements: none, one, a line, 4 KiB and more of float32 (shared out at 128 ranks and more), a slot, more than one.
COUNTS = (0, 1, 203, 1025, 2300, 4096, 5000)
ENOUGH = pytest.mark.full("48 ranks go the same ways")


@pytest.fixture(scope="module", params=[48, *(pytest.param(n, marks=ENOUGH) for n in (64, 128, 256))])
def many(request):
    if Layout.chosen() is not None:
        pytest.skip("of one host")
    pool = RankPool(request.param, "custom", group_timeout=300.0)
    yield pool
    assert not (wrong := pool.close()), wrong


def cases(reducing, size):
    if not reducing:
        kinds = [(torch.float32, None, "bits"), (torch.uint8, None, "bits")]
    else:
        kinds = [(torch.float32, "SUM", "rough"), (torch.bfloat16, "AVG", "rough"), (torch.int64, "MAX", "rough")]
        kinds.append((torch.float64, "PREMUL_SUM", "rough"))
    # Of the longer ones a few: each rank computes what all of them give.
    return [
        Case(dtype, count, op, kind, async_op=turn % 2 == 1, root=turn * 7)
        for turn, (count, (dtype, op, kind)) in enumerate((c, k) for c in COUNTS for k in kinds)
        if count * size <= 1 << 18 or turn % len(kinds) == 0
    ]


@pytest.mark.timeout(0)  # the pool's own deadline
@pytest.mark.parametrize("perform", [*MOVING, *REDUCING], ids=lambda f: f.__name__)
def test_small_sizes(many, perform):
    chosen = cases(perform in REDUCING, many.world_size)
    check(many, run_cases, perform, chosen, timeout=many.world_size * time_for(chosen) / 16)


def one_calls_another_count():
    group = dist.new_group()
    tensor = torch.ones(9 if dist.get_rank() == 11 else 8)
    try:
        dist.all_reduce(tensor, group=group)
    except CollectiveMismatchError as error:
        return str(error), tensor.tolist() == [1.0] * tensor.numel()
    return "it succeeded", False


@pytest.mark.timeout(0)
def test_one_that_calls_another_count(many):
    for rank, (error, untouched) in enumerate(many.run(one_calls_another_count, timeout=300)):
        assert "they differ in count" in error and untouched, (rank, error)
        assert re.search(r"rank 11: .*float32\[9\]", error), (rank, error)
