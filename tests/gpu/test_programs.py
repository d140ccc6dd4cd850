"""The articles' programs with their tensors on GPUs: what they do on two GPUs or more, and the same on one that ranks
share.

The CPU programs run unchanged in tests/programs; those that need no GPU but may use one are run here on it.
"""

import collections
import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.scatter_gather import scatter_kwargs

from conformance.cases import check

from .device import device_of


def some_gpus(needed):
    return pytest.mark.skipif(
        torch.cuda.device_count() < needed, reason=f"needs {needed} GPUs, and there are {torch.cuda.device_count()}"
    )


def point_to_point(kind):
    device, rank = device_of(kind), dist.get_rank()
    seen = []
    for blocking in (True, False):
        tensor = device.put(torch.zeros(1))
        if rank == 0:
            tensor += 1
            dist.send(tensor=tensor, dst=1) if blocking else dist.isend(tensor=tensor, dst=1).wait()
        elif rank == 1:
            dist.recv(tensor=tensor, src=0) if blocking else dist.irecv(tensor=tensor, src=0).wait()
        seen.append(tensor[0].item())
    return [] if rank > 1 or seen == [1.0, 1.0] else [str(seen)]


def group_all_reduce(kind):
    device = device_of(kind)
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return []
    seen = {}
    for name, op in (
        ("SUM", dist.reduce_op.SUM),
        ("PRODUCT", dist.reduce_op.PRODUCT),
        ("MAX", dist.reduce_op.MAX),
        ("MIN", dist.reduce_op.MIN),
    ):
        tensor = device.put(torch.tensor([2.0 + dist.get_rank()]))
        dist.all_reduce(tensor, op=op, group=group)
        seen[name] = tensor[0].item()
    return [] if seen == {"SUM": 5, "PRODUCT": 6, "MAX": 3, "MIN": 2} else [str(seen)]


def six_collectives(kind):
    device, rank, n = device_of(kind), dist.get_rank(), dist.get_world_size()
    wrong = []

    def expect(what, got, want):
        if got != want:
            wrong.append(f"{what}: {got} instead of {want}")

    for async_op in (False, True):
        tensor = device.put(torch.zeros(2))
        parts = [device.put(torch.full((2,), 10.0 + i)) for i in range(n)] if rank == 0 else None
        work = dist.scatter(tensor, scatter_list=parts, src=0, async_op=async_op)
        if async_op:
            work.wait()
        expect("scatter", tensor.tolist(), [10.0 + rank] * 2)
        parts = [device.put(torch.zeros(2)) for _ in range(n)] if rank == 0 else None
        work = dist.gather(device.put(torch.full((2,), 20.0 + rank)), gather_list=parts, dst=0, async_op=async_op)
        if async_op:
            work.wait()
        if rank == 0:
            expect("gather", [t.tolist() for t in parts], [[20.0 + r] * 2 for r in range(n)])
    tensor = device.put(torch.full((2,), 1.0 + rank))
    dist.reduce(tensor, 0, dist.reduce_op.SUM)
    if rank == 0:
        expect("reduce", tensor.tolist(), [sum(1.0 + r for r in range(n))] * 2)
    tensor = device.put(torch.full((2,), 30.0 + rank))
    dist.broadcast(tensor, 1)
    expect("broadcast", tensor.tolist(), [31.0] * 2)
    parts = [device.put(torch.zeros(2)) for _ in range(n)]
    dist.all_gather(parts, device.put(torch.full((2,), 40.0 + rank)))
    expect("all_gather", [t.tolist() for t in parts], [[40.0 + r] * 2 for r in range(n)])
    return wrong


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 5), nn.Linear(4 * 12 * 12, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)), dim=1)


def average_gradients(model):
    """Gradient averaging, as the article has it."""
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.reduce_op.SUM)
        param.grad.data /= size


def sgd_partitioned(kind):
    """Each rank trains on its part of generated digits; all end with the same bits, and learn."""
    device, rank = device_of(kind), dist.get_rank()
    torch.manual_seed(1234)
    model = Digits().to(device.name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    rng = torch.Generator().manual_seed(100 + rank)
    labels = torch.randint(0, 10, (256,), generator=rng)
    images = torch.rand(256, 1, 28, 28, generator=rng) * 0.1
    images[torch.arange(256), 0, 2 * labels, :] += 1.0
    losses = []
    for _ in range(4):
        total = 0.0
        for x, y in zip(images.split(64), labels.split(64)):
            optimizer.zero_grad()
            loss = F.nll_loss(model(device.put(x)), device.put(y))
            total += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        losses.append(total)
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    root = mine.clone()
    dist.broadcast(root, 0)
    return ([] if losses[-1] < 0.9 * losses[0] else [f"learns nothing: {losses}"]) + (
        [] if torch.equal(root, mine) else ["ranks ended with different parameters"]
    )


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def ddp_basic(kind):
    """demo_basic: inputs stay on the CPU, and DDP brings them to the GPU that device_ids names."""
    device, rank = device_of(kind), dist.get_rank()
    torch.manual_seed(42)
    model = ToyModel().to(device.name)
    ddp_model = DDP(model, device_ids=device.ids)
    loss_fn, optimizer = nn.MSELoss(), torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    torch.manual_seed(100 + rank)
    outputs = ddp_model(torch.randn(20, 10))
    loss_fn(outputs, torch.randn(20, 5).to(device.name)).backward()
    optimizer.step()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    root = mine.clone()
    dist.broadcast(root, 0)
    return [] if torch.equal(mine, root) and mine.abs().sum() > 0 else ["gradients differ"]


def ddp_checkpoint(kind, path):
    """demo_checkpoint: rank 0 saves, barrier, all load with map_location, train, barrier, rank 0 removes the file."""
    device, rank = device_of(kind), dist.get_rank()
    torch.manual_seed(rank)
    ddp_model = DDP(ToyModel().to(device.name), device_ids=device.ids)
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    with torch.no_grad():
        for p in ddp_model.parameters():
            p.fill_(float(rank))
    locations = {"cuda:0": device.name} if device.queues else device.name
    ddp_model.load_state_dict(torch.load(path, map_location=locations, weights_only=True))
    nn.MSELoss()(ddp_model(device.put(torch.ones(20, 10))), device.put(torch.ones(20, 5))).backward()
    torch.optim.SGD(ddp_model.parameters(), lr=0.001).step()
    dist.barrier()
    if rank == 0:
        os.remove(path)
    mine = torch.cat([p.detach().flatten() for p in ddp_model.parameters()])
    root = mine.clone()
    dist.broadcast(root, 0)
    return [] if torch.equal(mine, root) else ["ranks differ after the checkpoint"]


Point = collections.namedtuple("Point", "x y")


def scatter_beside(kind, devices):
    """scatter_kwargs, replicate, parallel_apply, gather and DataParallel while the group has calls under way."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    data = device.put(torch.full((1_000_000,), float(rank)))
    device.busy(0.05)
    work = dist.all_reduce(data, async_op=True)
    x = torch.arange(30.0).view(15, 2)
    inputs, kwargs = scatter_kwargs((x, Point(x, 3), "text"), {"factor": 2.0, "nested": [{"x": x}]}, devices)
    wrong = []
    parts = torch.cat([i[0].cpu() for i in inputs])
    if len(inputs) != len(devices) or not torch.equal(parts, x) or kwargs[0]["factor"] != 2.0:
        wrong.append(f"scatter_kwargs gave {inputs}, {kwargs}")
    if not torch.equal(torch.cat([i[1].x.cpu() for i in inputs]), x) or inputs[0][2] != "text":
        wrong.append("scatter_kwargs lost a namedtuple or a text")
    model = nn.Linear(2, 3)
    alone = copy.deepcopy(model)
    model = model.to(f"cuda:{devices[0]}")
    replicas = nn.parallel.replicate(model, devices)
    spread = nn.parallel.scatter(x.to(f"cuda:{devices[0]}"), devices)
    output = nn.parallel.gather(nn.parallel.parallel_apply(replicas[: len(spread)], spread), devices[0])
    torch.testing.assert_close(output.cpu(), alone(x))  # not exact: another BLAS
    parallel = nn.DataParallel(model, device_ids=devices)
    parallel(x).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    torch.testing.assert_close(model.weight.grad.cpu(), size * x.sum(0).expand(3, 2))
    work.wait()
    if not (data.cpu() == sum(range(size))).all():
        wrong.append("the all_reduce that was under way is wrong")
    return wrong


class ToyMpModel(nn.Module):
    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1, self.relu, self.net2 = nn.Linear(10, 10).to(dev0), nn.ReLU(), nn.Linear(10, 5).to(dev1)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x.to(self.dev0))).to(self.dev1))


def model_parallel(kind):
    """demo_model_parallel: a module on two GPUs of each rank's own, so DDP is given no device_ids."""
    rank = dist.get_rank()
    dev0, dev1 = f"cuda:{2 * rank}", f"cuda:{2 * rank + 1}"
    torch.cuda.set_device(2 * rank)
    ddp_model = DDP(ToyMpModel(dev0, dev1))
    nn.MSELoss()(ddp_model(torch.randn(20, 10)), torch.randn(20, 5).to(dev1)).backward()
    mine = torch.cat([p.grad.flatten().cpu() for p in ddp_model.parameters()])
    root = mine.clone()
    dist.broadcast(root, 0)
    return [] if torch.equal(mine, root) else ["gradients differ"]


def cupy_arrays(kind):
    """Arrays that torch has by DLPack, and whose memory is none of its allocator's: cupy's; on the CPU, numpy's. What a
    collective gives is in the array."""
    if kind == "cuda":
        import cupy as arrays
    else:
        import numpy as arrays
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    wrong = []
    for count in (4, 100_003, 1_000_000):  # by each way that collectives of ranks which share a GPU go
        whole = arrays.full(count + 8, 7, dtype="float32")
        mine = whole[8:]
        mine[...] = rank + 1
        tensor = torch.from_dlpack(mine)
        dist.all_reduce(tensor)
        device.synchronize()
        if not bool((mine == size * (size + 1) / 2).all()) or not bool((whole[:8] == 7).all()):
            wrong.append(f"all_reduce of {count}: {mine[:4]}, before it {whole[:8]}")
        every = arrays.zeros((size, count), dtype="float32")
        dist.all_gather_into_tensor(
            torch.from_dlpack(every), torch.from_dlpack(arrays.full(count, rank, dtype="float32"))
        )
        device.synchronize()
        if not all(bool((every[r] == r).all()) for r in range(size)):
            wrong.append(f"all_gather of {count}: {every[:, 0]}")
        other = arrays.zeros(count, dtype="float32")
        sent = dist.isend(torch.from_dlpack(arrays.full(count, rank, dtype="float32")), (rank + 1) % size)
        dist.recv(torch.from_dlpack(other), (rank - 1) % size)
        sent.wait()
        device.synchronize()
        if not bool((other == (rank - 1) % size).all()):
            wrong.append(f"send and recv of {count}: {other[:4]}")
    return wrong


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize(
    "program",
    [point_to_point, group_all_reduce, six_collectives, sgd_partitioned, ddp_basic, cupy_arrays],
    ids=lambda program: program.__name__,
)
def test_program(ranks, device, program):
    check(ranks, program, device)


@pytest.mark.world_sizes(2)
def test_checkpoint(ranks, device, tmp_path):
    check(ranks, ddp_checkpoint, device, str(tmp_path / "model.checkpoint"))


@pytest.mark.world_sizes(2)
def test_scatter_kwargs_and_data_parallel_on_one_gpu(ranks, device, needs_queues):
    check(ranks, scatter_beside, device, [0])


@some_gpus(2)
@pytest.mark.world_sizes(2)
def test_scatter_kwargs_and_data_parallel_on_two_gpus(ranks, device, needs_queues):
    check(ranks, scatter_beside, device, [0, 1])


@some_gpus(4)
@pytest.mark.world_sizes(2)
def test_model_parallel(ranks, device, needs_queues):
    check(ranks, model_parallel, device)
