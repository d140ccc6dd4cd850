"""DDP's buckets, which move to memory that collectives need not copy: which of them, when, and that nobody notices."""

import gc
import inspect
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from .models import assert_same, grads, integer_weights, integers
from .spawn import backend, run

FEATURES, OUT = 6, 15_000  # 420 KB of gradients of each of two layers
CAN = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # torch 2.12 and newer
ONE_LAYER = 0.3  # MB, which one layer's gradients exceed: two buckets
ARENA = "memfd:c10d_custom"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, OUT) for _ in range(2))

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], dim=1)


def model(seed=7):
    return integer_weights(Net(), seed)


def product(model, rank, step):
    """A loss whose gradients are sums of products of small integers."""
    x, y = integers(3, FEATURES, seed=100 + rank + 10 * step), integers(3, 2 * OUT, seed=200 + rank + 10 * step)
    return (model(x) * y).sum()


def expected(ranks, step):
    one = model()
    for rank in range(ranks):
        product(one, rank, step).backward()
    return [p.grad / ranks for p in one.parameters()]


def blocks():
    """How many this rank has reduced: a call that works where the tensors lie counts as one. None: there is no such
    memory here."""
    transport = getattr(dist.group.WORLD, "cpu_transport", None)
    if transport is None or not transport.has_arena():
        return None
    return transport.states(0)[dist.get_rank()].blocks_reduced


def passes(ddp, rank, size, count=5, zeroed=True):
    """The blocks that each of so many backward passes has reduced; their gradients are what one process computes."""
    reduced = []
    for step in range(count):
        ddp.zero_grad(set_to_none=zeroed)
        before = blocks()
        product(ddp, rank, step).backward()
        assert_same(grads(ddp), expected(size, step))
        reduced.append(None if before is None else blocks() - before)
    return reduced


def moved(reduced, calls):
    """Whether the buckets of the last passes were reduced where they lie, in so many calls."""
    return reduced[3:] == [calls] * len(reduced[3:])


def made(rank, size, options, calls, moves):
    ddp = DDP(model(seed=7 + rank), **options)
    reduced = passes(ddp, rank, size, zeroed=not options.get("gradient_as_bucket_view"))
    if reduced[0] is not None:
        assert reduced[0] > calls and moved(reduced, calls) == (moves and CAN), reduced


def newer(option, moves):
    lacks = pytest.mark.skipif(option not in inspect.signature(DDP).parameters, reason="this torch's DDP has it not")
    return pytest.param({option: True}, 1, moves, marks=lacks)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "options, calls, moves",
    [
        ({}, 1, True),
        ({"bucket_cap_mb": ONE_LAYER}, 2, True),
        ({"static_graph": True}, 1, True),
        ({"find_unused_parameters": True}, 1, True),
        ({"gradient_as_bucket_view": True}, 1, False),
        newer("batched_grad_copy", True),
        newer("lazy_bucket_allocation", False),
    ],
    ids=[
        *("default", "two_buckets", "static_graph", "find_unused", "gradient_as_bucket_view"),
        *("batched_grad_copy", "lazy_bucket_allocation"),
    ],
)
def test_which_move(size, options, calls, moves):
    run(made, size, options, calls, moves)


def seen_by_numpy(rank, size):
    """Gradients that are views of buckets, and whose memory the program has, too."""
    _, ddp = both = DDP(model()), DDP(model(), gradient_as_bucket_view=True)
    arrays = None
    for step in range(5):
        product(ddp, rank, step).backward()
        if step == 1:  # DDP makes its buckets anew after the first pass
            arrays = [p.grad.numpy() for p in ddp.parameters()]
        if arrays is not None:
            assert_same([torch.from_numpy(a) for a in arrays], expected(size, step))
        ddp.zero_grad(set_to_none=False)
    assert len(both) == 2  # so long there was one whose buckets nobody else sees


def test_a_gradient_that_is_a_bucket_stays_where_it_is():
    run(seen_by_numpy, 2)


def frozen(rank, size):
    """A program that has hidden its objects from the garbage collector, and so from who looks for DDP's modules."""
    seen_as_views = DDP(model(), gradient_as_bucket_view=True)
    gc.freeze()
    try:
        for ddp in (seen_as_views, DDP(model())):
            reduced = passes(ddp, rank, size, zeroed=False)
            assert reduced[0] is None or min(reduced) > 1, reduced
    finally:
        gc.unfreeze()


def test_where_modules_cannot_be_found_nothing_moves():
    run(frozen, 2)


def hooked(rank, size, hook):
    ddp = DDP(model())
    ddp.register_comm_hook(None, hook)
    reduced = passes(ddp, rank, size)
    assert reduced[0] is None or min(reduced) > 1, reduced


@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook], ids=lambda h: h.__name__)
def test_what_a_hook_in_python_sees_stays_where_it_is(hook):
    run(hooked, 2, hook)


def built_in(rank, size):
    ddp = DDP(model())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    reduced = passes(ddp, rank, size)
    assert reduced[0] is None or moved(reduced, 1) == CAN, reduced


def test_a_hook_in_cpp():
    run(built_in, 2)


def forgotten(rank, size):
    """Of Reducers that are gone nothing is kept, nor of what is reduced once."""
    for _ in range(3):
        passes(DDP(model()), rank, size)
        gc.collect()
    if blocks() is not None and CAN:
        assert len(dist.group.WORLD._buckets._decided) < 4


@pytest.mark.skipif(backend() != "custom", reason="what our groups keep")
def test_they_are_forgotten():
    run(forgotten, 2)


def sparse(rank, size):
    """What is no bucket of bytes, however large."""
    rows = 2000
    ddp = DDP(integer_weights(nn.Embedding(rows, 64, sparse=True)))
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.arange(rows)).sum().backward()
        assert_same([p.grad.to_dense() for p in ddp.parameters()], [torch.ones(rows, 64)])


def test_sparse_gradients():
    run(sparse, 2)


def switched_off(rank, size):
    with mock.patch.dict(os.environ, DDP_DISABLE_COMM_MEM="1"):
        reduced = passes(DDP(model()), rank, size)
    assert reduced[0] is None or min(reduced) > 1, reduced


def test_torchs_own_switch():
    run(switched_off, 2)


def on_one_rank(rank, size):
    with mock.patch.dict(os.environ, DDP_DISABLE_COMM_MEM=str(rank % 2)):
        reduced = passes(DDP(model()), rank, size)
    assert reduced[0] is None or min(reduced) > 1, reduced


@pytest.mark.parametrize("size", [2, 4])
def test_some_ranks_alone(size):
    run(on_one_rank, size)


def without_memory(rank, size):
    from c10d_custom.errors import TransportError

    refused = mock.Mock(side_effect=TransportError("none is left"))
    with mock.patch.object(type(dist.group.WORLD.cpu_transport), "take", refused):
        reduced = passes(DDP(model()), rank, size)
    if reduced[0] is not None:
        assert min(reduced) > 1 and refused.call_count == CAN, (reduced, refused.call_count)  # not for each pass again


@pytest.mark.skipif(backend() != "custom", reason="gloo has no such memory")
def test_without_memory():
    run(without_memory, 2)


def used():
    """Bytes of this process's own in groups' memory, and of others' that it has looked at."""
    found = resident = 0
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split()[0]:
                resident = ARENA in line
            elif resident and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
    return found


def freed(rank, size):
    """Buckets outlive their group, and go with their Reducer."""
    group = dist.new_group()
    before = used()
    wide = nn.Linear(1024, 4096)  # 16 MB of gradients
    ddp = DDP(wide, process_group=group)
    for _ in range(4):
        ddp(torch.ones(1, 1024)).sum().backward()
    kept = used() - before
    if CAN and blocks() is not None:
        assert kept > 16 << 20, kept
    dist.destroy_process_group(group)
    assert_same([wide.weight.grad], [torch.full_like(wide.weight, 4.0)])
    del ddp, group
    gc.collect()
    assert used() - before < 1 << 20, (before, used())


def test_they_go_with_their_reducer():
    run(freed, 2)
