"""Small models whose arithmetic is exact, and the comparisons that the tests share.

Weights and inputs are small integers held in floats, so that every product and
sum up to 2**24 is exact in float32, in whatever order it is computed; gradients
are divided by 2 or 4 ranks, which is exact too. Tests that take more than one
step leave that range and compare with assert_close, saying so.
"""

import torch
import torch.nn as nn


def integers(*shape, seed, low=-2, high=3, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=rng).to(dtype)


def integer_weights(module, seed=7):
    """Give every parameter small integer values, the same in every process."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(integers(*p.shape, seed=seed + i))
    return module


class Net(nn.Module):
    def __init__(self, width=8, out=4):
        super().__init__()
        self.net1 = nn.Linear(6, width)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(width, out)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def batch(rank, rows=4, features=6, out=4, dtype=torch.float32):
    """The rank's inputs and labels."""
    return (integers(rows, features, seed=100 + rank, dtype=dtype), integers(rows, out, seed=200 + rank, dtype=dtype))


def squared_error(output, label):
    """A sum, not a mean: no division that would round."""
    return ((output - label) ** 2).sum()


def mean_gradients(model, ranks, loss=squared_error):
    """Gradients of the mean over ranks of each rank's loss, by one process."""
    model.zero_grad()
    for rank in range(ranks):
        x, y = batch(rank)
        loss(model(x), y).backward()
    return [None if p.grad is None else p.grad / ranks for p in model.parameters()]


def assert_same(actual, expected):
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        if a is None or e is None:
            assert a is None and e is None
        else:
            torch.testing.assert_close(a, e, rtol=0, atol=0)


def grads(model):
    return [p.grad for p in model.parameters()]
