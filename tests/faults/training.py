"""A small training run for DDP, and what it must come to: computed by one process, without torch.distributed."""

import copy

import torch

RATE, MOMENTUM = 0.05, 0.9


def new_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )


def batch(shard, shards, step):
    """The part of a step's data that one of ``shards`` ranks gets."""
    rng = torch.Generator().manual_seed(1000 * step + 10 * shards + shard)
    x = torch.randn(24, 6, generator=rng)
    return x, (x[:, :1] - 0.5 * x[:, 1:2]).tanh()


def loss_of(model, shard, shards, step):
    x, y = batch(shard, shards, step)
    return (model(x) - y).square().mean()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), RATE, MOMENTUM)


def state(model, optimizer):
    """All that a step changes. The momentum of a parameter that has had no step is 0."""
    tensors = [p.data for p in model.parameters()]
    for p in model.parameters():
        momentum = optimizer.state[p].get("momentum_buffer")
        if momentum is None:
            momentum = optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        tensors.append(momentum)
    return tensors


def bits(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex()


def reference(steps, shards_of):
    """bits() after ``steps`` steps, each taken by ``shards_of(step)`` ranks. DDP scales each rank's gradient by 1/n;
    they are then added in rank order."""
    model = new_model()
    optimizer = optimizer_of(model)
    for step in range(steps):
        shards, total = shards_of(step), None
        for shard in range(shards):
            one = copy.deepcopy(model)
            loss_of(one, shard, shards, step).backward()
            scaled = [p.grad * (1.0 / shards) for p in one.parameters()]
            total = scaled if total is None else [a + b for a, b in zip(total, scaled)]
        for p, g in zip(model.parameters(), total):
            p.grad = g
        optimizer.step()
    return bits(model)
