"""DistributedDataParallel against one process that sees every rank's batch.

SyncBatchNorm is not here: it refuses CPU tensors itself ("expected input tensor
to be on cuda ..."), before any communication.
"""

import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from .models import Net, assert_same, batch, grads, integer_weights, integers, mean_gradients, squared_error
from .spawn import run


def plain(rank, size, options):
    model = integer_weights(Net())
    expected = mean_gradients(copy.deepcopy(model), size)
    if rank != 0:
        integer_weights(model, seed=50 + rank)  # DDP's constructor must bring rank 0's
    ddp = DDP(model, **options)
    for _ in range(3):  # the first passes build buckets and, where asked for, the static graph
        ddp.zero_grad(set_to_none=not options.get("gradient_as_bucket_view"))
        x, y = batch(rank)
        squared_error(ddp(x), y).backward()
        assert_same(grads(ddp), expected)
    before = [p.detach().clone() for p in ddp.parameters()]
    torch.optim.SGD(ddp.parameters(), lr=0.5).step()
    assert_same(ddp.parameters(), [b - 0.5 * g for b, g in zip(before, expected)])


OPTIONS = {
    "default": {},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    # Every parameter in a bucket of its own: several all_reduces in flight.
    "many_buckets": {"bucket_cap_mb": 1e-5},
    "find_unused_though_none_is": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(options, size):
    run(plain, size, options)


def with_the_reducers_pool(rank, size):
    with mock.patch.dict(os.environ, DDP_DISABLE_COMM_MEM="0"):  # it asks a group whether it has memory for its buckets
        plain(rank, size, {})


def test_a_reducer_that_wants_the_groups_memory_takes_its_own():
    run(with_the_reducers_pool, 2)


class TwoHeads(nn.Module):
    """A rank uses one head; the other has no gradient there."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x, head):
        return self.heads[head](self.body(x))


def unused(rank, size):
    model = integer_weights(TwoHeads())
    reference = copy.deepcopy(model)
    ddp = DDP(model, find_unused_parameters=True)
    for step in range(2):
        ddp.zero_grad()
        x, _ = batch(rank)
        ddp(x, (rank + step) % 2).sum().backward()
        reference.zero_grad()
        for r in range(size):
            reference(batch(r)[0], (r + step) % 2).sum().backward()
        assert_same(grads(model), [None if g is None else g / size for g in grads(reference)])
        # Used by no rank: stays without a gradient.
        assert all(p.grad is None for p in model.heads[2].parameters())


def test_find_unused_parameters():
    run(unused, 2)


def accumulation(rank, size):
    model = integer_weights(Net())
    alone = copy.deepcopy(model)
    ddp = DDP(model)
    x, y = batch(rank)
    with ddp.no_sync():
        for _ in range(2):
            squared_error(ddp(x), y).backward()
    squared_error(alone(x), y).backward()
    # Not averaged yet.
    assert_same(grads(ddp), [2 * g for g in grads(alone)])
    squared_error(ddp(x), y).backward()
    expected = mean_gradients(integer_weights(Net()), size)
    assert_same(grads(ddp), [3 * g for g in expected])


def test_no_sync_accumulates():
    run(accumulation, 2)


def uneven(rank, size):
    """Rank r has 2 + r batches. A rank that ran out shadows the others' collectives."""
    model = integer_weights(Net())
    reference = copy.deepcopy(model)
    ddp = DDP(model)
    seen = []
    with Join([ddp]):
        for _ in range(2 + rank):
            ddp.zero_grad()
            x, y = batch(rank)
            squared_error(ddp(x), y).backward()
            seen.append([p.grad.clone() for p in ddp.parameters()])
    for step, got in enumerate(seen):
        active = [r for r in range(size) if step < 2 + r]
        reference.zero_grad()
        for r in active:
            x, y = batch(r)
            squared_error(reference(x), y).backward()
        # By default a joined rank still counts in the divisor.
        assert_same(got, [g / size for g in grads(reference)])
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            ddp.zero_grad()
            x, y = batch(rank)
            squared_error(ddp(x), y).backward()
    # In the last step only the last rank was left, and divided by itself alone.
    if rank == size - 1:
        squared_error(reference.zero_grad() or reference(x), y).backward()
        assert_same(grads(ddp), grads(reference))


def test_join_with_uneven_inputs():
    run(uneven, 2)


def buffers(rank, size):
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))
    model.register_buffer("counter", torch.tensor([10 * rank]))
    ddp = DDP(model)
    assert model.counter.item() == 0
    ddp(batch(rank)[0])
    # Each rank has its own statistics after a forward pass; the next begins with rank 0's.
    mine = model[0].running_mean.clone()
    everybody = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everybody, mine)
    assert not torch.equal(everybody[0], everybody[1])
    model.counter.fill_(7 + rank)
    x = batch(rank)[0]
    ddp(x)
    assert model.counter.item() == 7
    # Exact: the same two operations on the same values as BatchNorm's own update.
    alone = nn.BatchNorm1d(6)
    alone.running_mean.copy_(everybody[0])
    alone(x)
    assert_same([model[0].running_mean], [alone.running_mean])
    assert model[0].num_batches_tracked.item() == 2


def test_buffers_are_broadcast():
    run(buffers, 2)


def mixed_dtypes(rank, size):
    """Parameters of two dtypes go into separate buckets."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 4)
            self.b = nn.Linear(4, 2, dtype=torch.float64)
            self.c = nn.Linear(2, 2, dtype=torch.bfloat16)

        def forward(self, x):
            return self.c(self.b(self.a(x).double()).bfloat16())

    model = Mixed()
    # Ones and small inputs: bfloat16 holds integers up to 256 exactly.
    for p in model.parameters():
        nn.init.ones_(p)
    reference = copy.deepcopy(model)
    ddp = DDP(model)
    x = integers(1, 6, seed=1 + rank, low=0, high=2)
    ddp(x).sum().backward()
    total = [0] * len(list(reference.parameters()))
    for r in range(size):
        reference.zero_grad()
        reference(integers(1, 6, seed=1 + r, low=0, high=2)).sum().backward()
        total = [t + g / size for t, g in zip(total, grads(reference))]
    assert_same(grads(ddp), total)


def test_parameters_of_several_dtypes():
    run(mixed_dtypes, 2)


def sampler_loop(rank, size):
    """Two epochs over a shuffled data set: every sample once an epoch, training as by one process."""
    torch.manual_seed(3)
    data = TensorDataset(
        integers(32, 6, seed=1, dtype=torch.float64), integers(32, 4, seed=2, dtype=torch.float64), torch.arange(32)
    )
    model = integer_weights(Net()).double()
    reference = copy.deepcopy(model)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.5)
    check = torch.optim.SGD(reference.parameters(), lr=1e-4, momentum=0.5)
    sampler = DistributedSampler(data, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = []
        for x, y, index in loader:
            optimizer.zero_grad()
            squared_error(ddp(x), y).backward()
            optimizer.step()
            everywhere = [torch.empty_like(index) for _ in range(size)]
            dist.all_gather(everywhere, index)
            everywhere = torch.cat(everywhere)
            order.append(everywhere)
            check.zero_grad()
            (squared_error(reference(data.tensors[0][everywhere]), data.tensors[1][everywhere]) / size).backward()
            check.step()
        order = torch.cat(order)
        assert sorted(order.tolist()) == list(range(32))
        orders.append(order.tolist())
    assert orders[0] != orders[1]
    # Not exact: after the first step weights are no integers, and the sum over the batch is grouped by rank.
    for p, q in zip(ddp.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_distributed_sampler_loop():
    run(sampler_loop, 2)
