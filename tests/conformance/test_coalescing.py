"""Many tensors in one call: the *_coalesced functions and the coalescing manager."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from . import reference
from .cases import Case, check, finish
from .cases import group as make_group

pytestmark = pytest.mark.world_sizes(2, 4)  # what lies above the transports is the same for any number of ranks


def _parts(case):
    """Three lengths for one case: its own, a small one, half of it."""
    return [dataclasses.replace(case, count=count) for count in (case.count, 7, case.count // 2)]


def all_reduce_coalesced(case, group):
    """The async form gives a Future."""
    cases = _parts(case)
    data = [group.placed_input(c) for c in cases]
    finish(dist.all_reduce_coalesced([d.tensor for d in data], case.reduce_op(), group.pg, case.async_op), case)
    for c, part in zip(cases, data):
        yield f"part of {c.count}", part, group.reduced(c)


@pytest.mark.parametrize("section", ["small", "contiguous", "strided", "offset"])
def test_all_reduce_coalesced(conform, section):
    conform(all_reduce_coalesced, section, reducing=True)


def _sharing(step, async_ops):
    """Of views of one tensor that overlap, each sums what was there before."""
    g = make_group()
    wrong = []
    for case in (Case(torch.float32, count, "SUM", "mild") for count in (12, 5000, 70000)):
        whole = torch.zeros(step * case.count)[::step].copy_(g.input(case))
        views = [whole[3:], whole, whole[:7], whole]
        future = dist.all_reduce_coalesced(views, dist.ReduceOp.SUM, g.pg, async_ops)
        if async_ops:
            future.wait()
        wrong += filter(None, [reference.difference(whole.contiguous(), g.reduced(case))])
    return wrong


@pytest.mark.parametrize("async_ops", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_all_reduce_coalesced_of_tensors_that_share_memory(ranks, step, async_ops):
    check(ranks, _sharing, step, async_ops)


def manager_all_reduce(case, group):
    cases = _parts(case)
    data = [group.placed_input(c) for c in cases]
    with dist._coalescing_manager(group.pg, async_ops=case.async_op) as manager:
        for part in data:
            dist.all_reduce(part.tensor, case.reduce_op(), group.pg)
    if case.async_op:
        manager.wait()
    for c, part in zip(cases, data):
        yield f"part of {c.count}", part, group.reduced(c)


def manager_all_gather(case, group):
    cases = _parts(case)
    data = [group.placed_input(c) for c in cases]
    outputs = [group.output(c, group.size * c.count) for c in cases]
    with dist._coalescing_manager(group.pg, async_ops=case.async_op) as manager:
        for output, part in zip(outputs, data):
            dist.all_gather_into_tensor(output.tensor, part.tensor, group.pg)
    if case.async_op:
        manager.wait()
    for c, output in zip(cases, outputs):
        want = torch.cat([group.input(c, i).view(torch.uint8) for i in range(group.size)]).view(c.dtype)
        yield f"part of {c.count}", output, want


def manager_reduce_scatter(case, group):
    cases = _parts(case)
    data = [group.placed_input(c, group.size * c.count) for c in cases]
    outputs = [group.output(c) for c in cases]
    with dist._coalescing_manager(group.pg, async_ops=case.async_op) as manager:
        for output, part in zip(outputs, data):
            dist.reduce_scatter_tensor(output.tensor, part.tensor, case.reduce_op(), group.pg)
    if case.async_op:
        manager.wait()
    for c, output in zip(cases, outputs):
        yield f"part of {c.count}", output, group.reduced(c, start=group.me * c.count)


@pytest.mark.parametrize("section", ["contiguous", "strided"])
@pytest.mark.parametrize("perform", [manager_all_reduce, manager_reduce_scatter])
def test_manager_reducing(conform, beyond_gloo, perform, section):
    beyond_gloo("has no coalesced form of reduce_scatter, and all_reduce_coalesced is tested above")
    conform(perform, section, reducing=True)


@pytest.mark.parametrize("section", ["contiguous", "strided"])
def test_manager_all_gather(conform, beyond_gloo, section):
    beyond_gloo("has no coalesced form of all_gather_into_tensor")
    conform(manager_all_gather, section)


def _manager_with_device(async_ops):
    """With a device the manager brackets single calls by start and end, instead of collecting them."""
    g = make_group()
    wrong = []
    case = Case(torch.float32, 5000, "SUM", "mild")
    summed, received = g.input(case), torch.zeros(5000)
    right, left = (g.me + 1) % g.size, (g.me - 1) % g.size
    sent = g.input(case)
    with dist._coalescing_manager(g.pg, torch.device("cpu"), async_ops=async_ops) as manager:
        dist.isend(sent, right)
        dist.irecv(received, left)
    if async_ops:
        manager.wait()
    with dist._coalescing_manager(g.pg, torch.device("cpu"), async_ops=async_ops) as manager:
        gathered = [torch.zeros(5000) for _ in g.ranks]
        dist.all_gather(gathered, sent, async_op=async_ops)
        dist.broadcast(summed, 0, async_op=async_ops)
    if async_ops:
        manager.wait()
    wrong += filter(
        None, [reference.difference(received, g.input(case, left)), reference.difference(summed, g.input(case, 0))]
    )
    wrong += filter(None, [reference.difference(got, g.input(case, i)) for i, got in enumerate(gathered)])
    return wrong


@pytest.mark.parametrize("async_ops", [False, True])
def test_manager_with_device(ranks, beyond_gloo, async_ops):
    beyond_gloo("does not implement startCoalescing")
    check(ranks, _manager_with_device, async_ops)


def _manager_empty():
    g = make_group()
    with dist._coalescing_manager(g.pg):
        pass
    total = torch.ones(3)
    dist.all_reduce(total)
    return [] if total.tolist() == [float(g.size)] * 3 else [f"afterwards all_reduce gives {total}"]


def test_manager_empty(ranks):
    check(ranks, _manager_empty)
