"""The conformance cases of the CPU, on tensors of a GPU: against the same reference, bit for bit."""

import dataclasses

import pytest
import torch

from conformance.cases import Case, check
from conformance.test_all_gather import all_gather, all_gather_coalesced, all_gather_into_tensor, all_gather_uneven
from conformance.test_all_reduce import all_reduce
from conformance.test_all_to_all import all_to_all, all_to_all_uneven
from conformance.test_all_to_all_single import all_to_all_single, all_to_all_single_uneven
from conformance.test_broadcast import broadcast
from conformance.test_coalescing import all_reduce_coalesced, manager_all_gather, manager_reduce_scatter
from conformance.test_functional import (
    functional_all_gather,
    functional_all_reduce,
    functional_all_to_all,
    functional_broadcast,
    functional_reduce_scatter,
)
from conformance.test_gather import gather
from conformance.test_reduce import reduce
from conformance.test_reduce_scatter import reduce_scatter, reduce_scatter_tensor
from conformance.test_scatter import scatter
from conformance.test_send_recv import batch, send_recv

from .selection import ALL, FEW, run_cases_on, time_for

REDUCING = {all_reduce: ALL, reduce_scatter_tensor: ALL, reduce: FEW, reduce_scatter: FEW}
MOVING = {
    broadcast: ALL,
    all_gather_into_tensor: ALL,
    all_to_all_single: ALL,
    all_gather: FEW,
    all_gather_uneven: FEW,
    gather: FEW,
    scatter: FEW,
    all_to_all: FEW,
    all_to_all_uneven: FEW,
    all_to_all_single_uneven: FEW,
}
MESSAGES = {send_recv: FEW, batch: FEW}


def name(perform):
    return perform.__name__


@pytest.mark.parametrize("perform", REDUCING, ids=name)
def test_reducing(conform, perform):
    conform(perform, REDUCING[perform], reducing=True)


@pytest.mark.parametrize("perform", MOVING, ids=name)
def test_moving(conform, perform):
    conform(perform, MOVING[perform])


@pytest.mark.parametrize("perform", MESSAGES, ids=name)
def test_messages(conform, perform, ranks):
    if ranks.world_size == 1 and perform is send_recv:
        pytest.skip("send to oneself is refused by torch")
    conform(perform, MESSAGES[perform])


@pytest.mark.parametrize(
    "perform",
    [functional_all_reduce, functional_reduce_scatter, all_reduce_coalesced, manager_reduce_scatter],
    ids=name,
)
def test_other_ways_to_reduce(conform, perform):
    conform(perform, ("contiguous",), reducing=True)


@pytest.mark.parametrize(
    "perform",
    [functional_all_gather, functional_broadcast, functional_all_to_all, all_gather_coalesced, manager_all_gather],
    ids=name,
)
def test_other_ways_to_move(conform, perform):
    conform(perform, ("contiguous",))


# Around half of a staging buffer (C10D_CUSTOM_CUDA_STAGING_BYTES, 64 MiB unless set), and beyond two whole ones.
HALF, BEYOND = 32 << 20, 150 << 20


def large_cases(reducing, share):
    op, kind = ("SUM", "rough") if reducing else (None, "bits")
    half, beyond = (
        Case(torch.float32, HALF // 4 // share, op, kind),
        Case(torch.float32, BEYOND // 4 // share + 3, op, kind),
    )
    return [
        dataclasses.replace(half, count=half.count - 1),
        dataclasses.replace(half, layout="offset", async_op=True, root=1),
        dataclasses.replace(half, count=half.count + 3),
        beyond,
        dataclasses.replace(half, dtype=torch.bfloat16, count=2 * half.count + 5, async_op=True),
    ]


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize(
    "perform",
    [
        all_reduce,
        reduce_scatter_tensor,
        reduce,
        broadcast,
        all_gather_into_tensor,
        all_to_all_single,
        all_to_all_single_uneven,
        send_recv,
    ],
    ids=name,
)
def test_large(ranks, device, perform):
    one = perform in (all_reduce, reduce, broadcast, send_recv)
    cases = large_cases(perform in REDUCING, 1 if one else ranks.world_size)
    if device != "cuda":
        cases = [dataclasses.replace(case, count=case.count // 64) for case in cases]
    check(ranks, run_cases_on, device, perform, cases, timeout=time_for(cases))
