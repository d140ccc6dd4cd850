"""torch.compile over functions that communicate."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel as DDP

from .models import Net, assert_same, batch, grads, integer_weights, integers, mean_gradients, squared_error
from .spawn import run


def functional(x):
    y = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
    z = funcol.all_gather_tensor(y + 1, 0, dist.group.WORLD)
    return funcol.reduce_scatter_tensor(z - 1, "sum", 0, dist.group.WORLD) + 3


def in_place(x):
    y = x * 2
    dist.all_reduce(y)
    gathered = torch.empty(2 * dist.get_world_size(), *y.shape[1:])
    dist.all_gather_into_tensor(gathered, y[:2])
    return y + 1, gathered * 2


def compiled(rank, size, compiler):
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1  # no pool of compiling processes
    x = integers(4, 3, seed=10 + rank)
    total = 2 * sum(integers(4, 3, seed=10 + r) for r in range(size))
    # all_gather then reduce_scatter of equal rows: the sum, once per rank.
    assert_same([functional(x)], [size * total + 3])
    one = torch.compile(functional, backend=compiler, fullgraph=True)
    for _ in range(2):
        assert_same([one(x)], [size * total + 3])

    expected = in_place(x)
    assert_same([expected[0]], [total + 1])
    two = torch.compile(in_place, backend=compiler, fullgraph=True)
    for _ in range(2):
        assert_same(two(x), expected)
    assert_same([expected[1][:2]], [2 * total[:2]])


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_collectives(compiler):
    run(compiled, 2, compiler)


@pytest.mark.full("inductor compiles C++ for a minute; what it is given is what aot_eager is given")
def test_compiled_collectives_with_inductor():
    # The C++ compiler runs once per rank and kernel.
    run(compiled, 2, "inductor", deadline=120)


def compiled_ddp(rank, size):
    """DDPOptimizer cuts the graph at bucket borders, so that reduction overlaps with compiled backward."""
    torch._dynamo.reset()
    model = integer_weights(Net(width=60000))  # more than one bucket of 1 MiB
    expected = mean_gradients(copy.deepcopy(model), size)
    ddp = torch.compile(DDP(model, bucket_cap_mb=1), backend="aot_eager")
    x, y = batch(rank)
    for _ in range(2):
        model.zero_grad()
        squared_error(ddp(x), y).backward()
        assert_same(grads(model), expected)


def test_compiled_ddp():
    run(compiled_ddp, 2)
