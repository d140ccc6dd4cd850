"""torch.distributed.nn: collectives through which gradients flow.

The backward pass of each is the collective's transpose; both directions are
compared with the same function of all ranks' inputs, computed in one process.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .models import assert_same, integers
from .spawn import run


def everything(rank, size):
    """Every rank has an x; the gradient is that of the sum of all weighted outputs."""
    xs = [integers(2 * size, 3, seed=10 + r).requires_grad_() for r in range(size)]
    x = xs[rank].detach().clone().requires_grad_()

    def compare(output, expected, weight=None):
        """expected: every rank's output, as a function of xs."""
        x.grad = None
        for other in xs:
            other.grad = None
        assert_same([output], [expected[rank]])
        weights = [integers(*e.shape, seed=70 + r) for r, e in enumerate(expected)]
        (output * weights[rank]).sum().backward()
        sum((e * v).sum() for e, v in zip(expected, weights)).backward()
        # Zeros, and not None, where a rank's input reaches no output.
        assert_same([x.grad], [torch.zeros_like(x) if xs[rank].grad is None else xs[rank].grad])

    total = sum(xs)
    compare(dnn.all_reduce(x), [total] * size)
    compare(torch.stack(dnn.all_gather(x)), [torch.stack(xs)] * size)
    # split() and chunk() of a leaf, so that the reference is differentiable too.
    compare(
        torch.stack(dnn.all_to_all([torch.empty(2, 3) for _ in range(size)], list(x.chunk(size)))),
        [torch.stack([o.chunk(size)[r] for o in xs]) for r in range(size)],
    )
    compare(
        dnn.all_to_all_single(torch.empty(2 * size, 3), x),
        [torch.cat([o.chunk(size)[r] for o in xs]) for r in range(size)],
    )
    compare(dnn.reduce_scatter(torch.empty(2, 3), list(x.chunk(size))), list(total.chunk(size)))
    compare(dnn.broadcast(x, src=1), [xs[1]] * size)

    root = size - 1
    gathered = dnn.gather(x, dst=root)
    if rank == root:
        compare(torch.stack(gathered), [torch.stack(xs) if r == root else torch.zeros(()) for r in range(size)])
    else:
        # What the other ranks get back is not part of the result, but gradients flow through it.
        x.grad = None
        (torch.stack(gathered) * 0).sum().backward()
        expected = integers(*torch.stack(xs).shape, seed=70 + root)
        assert_same([x.grad], [expected[rank]])

    reduced = dnn.reduce(x, dst=root)
    x.grad = None
    weight = integers(*x.shape, seed=5)
    (reduced * (weight if rank == root else 0)).sum().backward()
    if rank == root:
        assert_same([reduced], [total])
    assert_same([x.grad], [weight])


def test_gradients_through_collectives():
    run(everything, 2)


@pytest.mark.full("on two ranks it runs above")
def test_gradients_through_collectives_on_four_ranks():
    run(everything, 4)


def functional(rank, size):
    """torch.distributed._functional_collectives: DTensor's and torch.compile's entry, called directly."""
    group = dist.group.WORLD
    x = integers(2 * size, 3, seed=10 + rank)
    xs = [integers(2 * size, 3, seed=10 + r) for r in range(size)]
    reduced = funcol.all_reduce(x, "sum", group)
    # Not waited for until used.
    assert isinstance(reduced, AsyncCollectiveTensor)
    assert_same([reduced + 0], [sum(xs)])
    for op, expected in (
        ("max", torch.stack(xs).amax(0)),
        ("min", torch.stack(xs).amin(0)),
        ("avg", sum(xs) / size),
        ("product", torch.stack(xs).prod(0)),
    ):
        if op == "avg" and dist.get_backend() == "gloo":
            continue  # gloo has no AVG
        assert_same([funcol.all_reduce(x, op, group) + 0], [expected])
    assert_same([funcol.all_gather_tensor(x, 0, group) + 0], [torch.cat(xs)])
    assert_same([funcol.all_gather_tensor(x, 1, group) + 0], [torch.cat(xs, 1)])
    assert_same([funcol.reduce_scatter_tensor(x, "sum", 0, group) + 0], [sum(xs).chunk(size)[rank]])
    sent = [r + 1 if r else 2 * size - sum(range(2, size + 1)) for r in range(size)]
    if min(sent) >= 0:
        # Rank r sends sent[d] rows to rank d.
        expected = torch.cat([o.split(sent)[rank] for o in xs])
        assert_same([funcol.all_to_all_single(x, [sent[rank]] * size, sent, group) + 0], [expected])
    assert_same([funcol.broadcast(x, 1, group) + 0], [xs[1]])
    many = funcol.all_reduce_coalesced([x, x + 1], "sum", group)
    assert_same([m + 0 for m in many], [sum(xs), sum(xs) + size])
    gathered = funcol.all_gather_into_tensor_coalesced([x, x[:1]], group)
    assert_same([g + 0 for g in gathered], [torch.cat(xs), torch.cat([o[:1] for o in xs])])
    scattered = funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)
    assert_same([s + 0 for s in scattered], [sum(xs).chunk(size)[rank], 2 * sum(xs).chunk(size)[rank]])


def test_functional_collectives():
    run(functional, 2)
