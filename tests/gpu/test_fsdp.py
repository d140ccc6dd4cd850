"""Fully sharded data parallel (the second generation) on GPUs, against one process, exactly."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ecosystem.models import Net, assert_same, batch, grads, integer_weights, mean_gradients, squared_error

from .device import device_of


def full(tensors):
    return [(t.full_tensor() if isinstance(t, DTensor) else t).cpu() for t in tensors]


def sharded(kind, reshard, shape):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    reference = integer_weights(Net(width=7))  # 7 rows: no number of ranks divides them
    expected = mean_gradients(copy.deepcopy(reference), size)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device.kind, shape, mesh_dim_names=names)
    model = integer_weights(Net(width=7)).to(device.name)
    for layer in (model.net1, model.net2, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    assert all(p.placements[-1] == Shard(0) for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = batch(rank)
    output = model(device.put(x))
    assert_same([output.cpu()], [reference(x)])
    squared_error(output, device.put(y)).backward()
    assert_same(full(grads(model)), expected)
    optimizer.step()
    assert_same(full(model.parameters()), [p.detach() - 0.5 * g for p, g in zip(reference.parameters(), expected)])


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(ranks, device, reshard):
    ranks.run(sharded, device, reshard, (ranks.world_size,))


@pytest.mark.world_sizes(4)
def test_fsdp2_hybrid(ranks, device):
    ranks.run(sharded, device, True, (2, ranks.world_size // 2))
