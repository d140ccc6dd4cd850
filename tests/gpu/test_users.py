"""What users run on GPUs, shared or not: tensor parallelism, checkpoints of FSDP2, compiled DDP and FSDP2.
Against one process, exactly where the arithmetic is."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from conformance.cases import check
from ecosystem.models import Net, assert_same, batch, grads, integer_weights, squared_error

from .device import device_of


def whole(tensors):
    return [(t.full_tensor() if isinstance(t, DTensor) else t).cpu() for t in tensors]


def tensor_parallel(kind):
    """Colwise, then Rowwise: an all_reduce forward, and one backward."""
    device, size = device_of(kind), dist.get_world_size()
    reference = integer_weights(Net(width=8))
    x, y = batch(0)
    squared_error(reference(x), y).backward()
    mesh = init_device_mesh(device.kind, (size,))
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    model = parallelize_module(integer_weights(Net(width=8)).to(device.name), mesh, plan)
    assert model.net1.weight.to_local().shape == (8 // size, 6)
    output = model(device.put(x))
    assert_same([output.cpu()], [reference(x)])
    squared_error(output, device.put(y)).backward()
    assert_same(whole(grads(model)), grads(reference))
    return []


def checkpoint(kind, folder):
    """A model of FSDP2 and its optimizer go on from what was saved as if nothing had been."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.kind, (size,))

    def begin(seed):
        model = integer_weights(Net(width=7), seed).to(device.name)
        for layer in (model.net1, model.net2, model):
            fully_shard(layer, mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model, optimizer):
        x, y = batch(rank)
        optimizer.zero_grad()
        squared_error(model(device.put(x)), device.put(y)).backward()
        optimizer.step()

    model, optimizer = begin(7)
    step(model, optimizer)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=folder)
    step(model, optimizer)
    other, others = begin(50)
    step(other, others)  # so that the optimizer has a state to load into
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, others)))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, others, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    step(other, others)
    assert_same(whole(other.parameters()), whole(model.parameters()))
    return []


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x):
        return self.two(self.norm(nn.functional.gelu(self.one(x))))


def compiled(kind, folder, sharded, mode):
    """DDP, or FSDP2 if ``sharded``, under torch.compile learns as without. ``mode``: of torch.compile; with
    "reduce-overhead" what lies between the collectives is replayed as CUDA graphs."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{dist.get_rank()}"
    device, rank = device_of(kind), dist.get_rank()
    torch.manual_seed(0)
    first, curves = Smooth(), []
    for compile_ in (False, True):
        plain = copy.deepcopy(first).to(device.name)
        if sharded:
            model = fully_shard(plain, mesh=init_device_mesh(device.kind, (dist.get_world_size(),)))
        else:
            model = DDP(plain, device_ids=device.ids)
        how = {"mode": mode} if kind == "cuda" else {"backend": "aot_eager"}
        call = torch.compile(model, **how) if compile_ else model
        optimizer, inputs, curve = torch.optim.SGD(model.parameters(), lr=0.05), torch.Generator().manual_seed(rank), []
        for _ in range(6):
            optimizer.zero_grad()
            loss = (call(device.put(torch.randn(16, 32, generator=inputs))) - 1).square().mean()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(torch.tensor(curve))
        every = [torch.zeros(first.one.weight.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(every, whole([plain.one.weight.detach()])[0])
        assert all(torch.equal(every[0], w) for w in every), "the ranks' weights differ"
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    torch.testing.assert_close(*curves, rtol=1e-3, atol=1e-3)
    return []


@pytest.mark.world_sizes(2, 4)
def test_tensor_parallel(ranks, device):
    check(ranks, tensor_parallel, device)


@pytest.mark.world_sizes(2)
def test_checkpoint_of_fsdp2(ranks, device, tmp_path):
    check(ranks, checkpoint, device, str(tmp_path))


@pytest.mark.world_sizes(2)
def test_compiled_ddp(ranks, device, tmp_path):
    check(ranks, compiled, device, str(tmp_path), False, None)


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_compiled_with_reduce_overhead(ranks, device, tmp_path, sharded):
    check(ranks, compiled, device, str(tmp_path), sharded, "reduce-overhead")
