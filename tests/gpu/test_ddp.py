"""DistributedDataParallel and its communication hooks on GPUs that ranks share or have to themselves, against one
process.

Weights and inputs are small integers (ecosystem/models.py), so that every sum is exact in whatever order, and equality
is asked for. That the ranks agree is asked of real numbers too.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ecosystem.models import Net, assert_same, batch, grads, integer_weights, mean_gradients, squared_error

from .device import device_of

OPTIONS = {
    "default": {},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "many_buckets": {"bucket_cap_mb": 1e-5},
    "find_unused": {"find_unused_parameters": True},
}


def on_cpu(tensors):
    return [None if t is None else t.cpu() for t in tensors]


def exact(kind, options, ids):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    reference = integer_weights(Net())
    expected = mean_gradients(reference, size)
    model = integer_weights(Net(), seed=7 if rank == 0 else 50 + rank)  # DDP's constructor must bring rank 0's
    ddp = DDP(model.to(device.name), device_ids=device.ids if ids else None, **options)
    x, y = batch(rank)
    for _ in range(3):
        ddp.zero_grad(set_to_none=not options.get("gradient_as_bucket_view"))
        # With device_ids, DDP itself brings inputs to the GPU, on a stream of its own.
        output = ddp(x if ids else device.put(x))
        squared_error(output, device.put(y)).backward()
        assert_same(on_cpu(grads(ddp)), expected)
    torch.optim.SGD(ddp.parameters(), lr=0.5).step()
    assert_same(on_cpu(ddp.parameters()), [p.detach() - 0.5 * g for p, g in zip(reference.parameters(), expected)])


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("ids", [True, False], ids=["device_ids", "no_device_ids"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(ranks, device, options, ids):
    ranks.run(exact, device, options, ids)


def bits(model):
    """All parameters as bytes, on the CPU."""
    return torch.cat([p.detach().contiguous().view(-1).view(torch.uint8) for p in model.parameters()]).cpu()


def training(kind, dtype, steps):
    """Real numbers: after every step all ranks hold rank 0's bits, and the all_reduce was that of the mean gradient."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 257), nn.Tanh(), nn.Linear(257, 33)).to(device.name, dtype)
    alone = copy.deepcopy(model)
    ddp = DDP(model, device_ids=device.ids, bucket_cap_mb=0.03)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (ddp, alone)]
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        x = device.put(torch.randn(16, 64, dtype=dtype))
        for m, optimizer in zip((ddp, alone), optimizers):
            optimizer.zero_grad()
            m(x).square().mean().backward()
        for p in alone.parameters():  # the same sums by hand: in rank order on the CPU, divided as DDP divides
            everyone = [torch.zeros_like(p.grad, device="cpu") for _ in range(size)]
            dist.all_gather(everyone, p.grad.cpu() / size)
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            total = everyone[0].to(wide)
            for part in everyone[1:]:
                total += part.to(wide)
            p.grad.copy_(total.to(dtype))
        for m, optimizer in zip((ddp, alone), optimizers):
            optimizer.step()
        mine = bits(ddp)
        root = mine.clone()
        dist.broadcast(root, 0)
        if not torch.equal(root, mine):
            return f"step {step}: parameters differ from rank 0's in {(root != mine).sum()} bytes"
        if not torch.equal(mine, bits(alone)):
            return (
                f"step {step}: parameters differ from those of averaging by hand in {(mine != bits(alone)).sum()} bytes"
            )
    return None


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_of_parameters(ranks, device, dtype):
    assert not any(found := ranks.run(training, device, dtype, 5)), found


def hooked(kind):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    expected = mean_gradients(integer_weights(Net()), size)

    def run(hook, state=None, passes=2):
        ddp = DDP(integer_weights(Net()).to(device.name), device_ids=device.ids)
        ddp.register_comm_hook(state, hook)
        x, y = (device.put(t) for t in batch(rank))
        for _ in range(passes):
            ddp.zero_grad()
            squared_error(ddp(x), y).backward()
        return on_cpu(grads(ddp))

    assert_same(run(default_hooks.allreduce_hook), expected)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)  # before that a plain all_reduce
    assert_same(run(powerSGD_hook.powerSGD_hook, state), expected)

    def twice(state, bucket):
        """A callback that issues a collective and waits for it, on the stream it is given."""

        def again(done):
            tensor = done.value()[0]
            dist.all_reduce(tensor)
            return tensor / size**2

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    assert_same(run(twice), expected)
    for narrow, hook in (
        (torch.float16, default_hooks.fp16_compress_hook),
        (torch.bfloat16, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
    ):
        total = None
        for r in range(size):
            model = integer_weights(Net())
            x, y = batch(r)
            squared_error(model(x), y).backward()
            parts = [(g.to(narrow) / size).float() for g in grads(model)]
            total = parts if total is None else [t + p for t, p in zip(total, parts)]
        assert_same(run(hook), [t.to(narrow).float() for t in total])


@pytest.mark.world_sizes(2, 4)
def test_hooks(ranks, device):
    ranks.run(hooked, device)


def power_sgd(kind):
    """A gradient of rank one is what a rank-1 approximation keeps."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(32, 16, bias=False).to(device.name)
    ddp = DDP(model, device_ids=device.ids)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    column = torch.linspace(1, 2, 32)
    for _ in range(4):
        ddp.zero_grad()
        ddp(device.put((column * (1 + rank))[None])).sum().backward()
        expected = torch.ones(16, 1) * column * (sum(1 + r for r in range(size)) / size)
        # Not exact: P and Q are made orthonormal in float32.
        torch.testing.assert_close(model.weight.grad.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.world_sizes(2)
def test_power_sgd(ranks, device):
    ranks.run(power_sgd, device)


def unsynchronised(kind):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    ddp = DDP(integer_weights(Net()).to(device.name), device_ids=device.ids)
    x, y = (device.put(t) for t in batch(rank))
    with ddp.no_sync():
        for _ in range(2):
            squared_error(ddp(x), y).backward()
    squared_error(ddp(x), y).backward()
    assert_same(on_cpu(grads(ddp)), [3 * g for g in mean_gradients(integer_weights(Net()), size)])


@pytest.mark.world_sizes(2)
def test_no_sync(ranks, device):
    ranks.run(unsynchronised, device)


def buffers(kind):
    """Buffers are broadcast from rank 0 before a forward pass; SyncBatchNorm takes statistics over all ranks."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    model = nn.Linear(6, 4)
    model.register_buffer("counter", torch.tensor([10 * rank]))
    ddp = DDP(model.to(device.name), device_ids=device.ids)
    model.counter.fill_(7 + rank)
    ddp(device.put(batch(rank)[0]))
    assert model.counter.item() == 7
    if device.queues:  # it refuses CPU tensors
        norm = nn.SyncBatchNorm(6).to(device.name)
        alone = nn.BatchNorm1d(6)
        output = norm(device.put(batch(rank)[0])).cpu()
        expected = alone(torch.cat([batch(r)[0] for r in range(size)])).chunk(size)[rank]
        # Not exact: the means of the ranks are combined by Welford's formula.
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.world_sizes(2)
def test_buffers(ranks, device):
    ranks.run(buffers, device)
