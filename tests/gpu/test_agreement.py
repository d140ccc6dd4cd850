"""The same call on "custom" and on gloo's CUDA path or NCCL, in the same processes: equal bits where both can do it."""

import functools

import pytest
import torch
import torch.distributed as dist

from conformance import gloo, reference, values
from conformance.cases import Case, Group
from conformance.test_all_gather import all_gather, all_gather_into_tensor
from conformance.test_all_reduce import all_reduce
from conformance.test_all_to_all_single import all_to_all_single
from conformance.test_broadcast import broadcast
from conformance.test_gather import gather
from conformance.test_reduce import reduce
from conformance.test_reduce_scatter import reduce_scatter_tensor
from conformance.test_scatter import scatter

from .device import device_of

REDUCING = (all_reduce, reduce, reduce_scatter_tensor)
# Every backend has them on a GPU: here a refusal by the other one is a failure of this test.
SURE = ("all_reduce", "broadcast")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8)


@functools.cache
def other_group(backend):
    return dist.new_group(backend=backend)


def results(perform, case, group):
    return [(what, values.raw(got.read())) for what, got, _ in perform(case, group)]


def agree(perform, backend, cases, kind):
    """(what differs, what the other backend refused)"""
    device, ranks = device_of(kind), tuple(range(dist.get_world_size()))
    ours, theirs = Group(dist.group.WORLD, ranks, device.name), Group(other_group(backend), ranks, device.name)
    wrong, refused = [], []
    for case in cases:
        try:
            others = results(perform, case, theirs)
        except (RuntimeError, ValueError) as error:
            refused.append(f"{case}: {str(error).splitlines()[0][:200]}")
            continue
        for (what, mine), (_, other) in zip(results(perform, case, ours), others, strict=True):
            if perform is reduce and what.endswith("away from the root"):
                continue  # gloo leaves anything there
            if problem := reference.difference(mine, other):
                wrong.append(f"{case}: {what}: {problem}")
    return wrong, refused


def cases_for(perform, backend, ranks):
    ops = ("SUM", "MAX", "MIN", "PRODUCT", "AVG") if perform in REDUCING else (None,)
    cases = [
        Case(dtype, count, op, "mild" if op else "bits", root=root)
        for root, (dtype, op, count) in enumerate((d, o, n) for d in DTYPES for o in ops for n in (7, 40001))
        if op is None or values.has_meaning(dtype, op)
    ]
    if backend == "gloo":
        cases = [case for case in cases if not gloo.lacks(perform.__name__, case, ranks)]
    return [case for case in cases if not (case.op == "AVG" and case.dtype in values.INTEGERS)]


def compare(pool, perform, backend, device):
    cases = cases_for(perform, backend, pool.world_size)
    found = pool.run(agree, perform, backend, cases, device, timeout=60)
    differ = [f"rank {rank}: {problem}" for rank, (wrong, _) in enumerate(found) for problem in wrong]
    assert not differ, "\n".join(differ[:20])
    refused = found[0][1]
    if perform.__name__ in SURE:
        assert not refused, refused
    elif len(refused) == len(cases):
        pytest.skip(f"{backend} cannot: {refused[0]}")


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize(
    "perform",
    [
        all_reduce,
        broadcast,
        reduce,
        reduce_scatter_tensor,
        all_gather,
        all_gather_into_tensor,
        gather,
        scatter,
        all_to_all_single,
    ],
    ids=lambda perform: perform.__name__,
)
def test_gloo(ranks, device, perform):
    compare(ranks, perform, "gloo", device)


@pytest.mark.parametrize(
    "perform",
    [all_reduce, broadcast, reduce, reduce_scatter_tensor, all_gather, all_gather_into_tensor, all_to_all_single],
    ids=lambda perform: perform.__name__,
)
def test_nccl(ranks, device, perform):
    if device != "cuda" or not dist.is_nccl_available():
        pytest.skip("NCCL needs a GPU and a torch that bundles it")
    if torch.cuda.device_count() < ranks.world_size:
        pytest.skip(f"NCCL wants a GPU for each rank: {ranks.world_size} ranks, {torch.cuda.device_count()} GPUs")
    compare(ranks, perform, "nccl", device)
