"""ZeroRedundancyOptimizer and the Join context with several participants."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from .models import Net, assert_same, batch, integer_weights, squared_error
from .spawn import backend, run


def zero(rank, size, options):
    """The same steps as the plain optimizer, bit by bit: both see DDP's averaged gradients."""
    ddp = DDP(integer_weights(Net()))
    plain = DDP(integer_weights(Net()))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.25, **options)
    reference = torch.optim.Adam(plain.parameters(), lr=0.25)
    x, y = batch(rank)
    for _ in range(3):
        for model, stepper in ((ddp, optimizer), (plain, reference)):
            stepper.zero_grad()
            squared_error(model(x), y).backward()
            stepper.step()
        assert_same(ddp.parameters(), plain.parameters())
    # Each rank keeps a part of the moments only.
    kept = sum(s["exp_avg"].numel() for s in optimizer.optim.state.values())
    total = sum(p.numel() for p in ddp.parameters())
    counts = [None] * size
    dist.all_gather_object(counts, kept)
    assert sum(counts) == total and max(counts) < total, counts

    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()["state"]
        for i, p in enumerate(plain.parameters()):
            assert_same([state[i]["exp_avg"]], [reference.state[p]["exp_avg"]])


def test_zero_redundancy_optimizer():
    run(zero, 2, {})


def test_zero_redundancy_optimizer_with_buckets():
    run(zero, 2, {"parameters_as_bucket_view": True})


def test_zero_redundancy_optimizer_on_four_ranks():
    run(zero, 4, {})


def uneven(rank, size):
    """DDP and the sharded optimizer both join early; the last model reaches every rank."""
    lr = 2.0**-12
    ddp = DDP(integer_weights(Net()))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.SGD, lr=lr)
    owners = [optimizer._param_to_rank[p] for p in ddp.parameters()]
    assert set(owners) == set(range(size))
    steps = 0
    with Join([ddp, optimizer]):
        for _ in range(2 + rank):
            optimizer.zero_grad()
            x, y = batch(rank)
            squared_error(ddp(x), y).backward()
            optimizer.step()
            steps += 1
    assert steps == 2 + rank
    for p in ddp.parameters():
        everybody = [torch.empty_like(p) for _ in range(size)]
        dist.all_gather(everybody, p.detach())
        assert all(torch.equal(everybody[0], e) for e in everybody)

    # By one process: only ranks that still have input contribute, the divisor stays. A parameter's owner
    # that has no input left goes on stepping with the gradient it saw last: DDP's shadowing of the
    # all_reduce does not write gradients.
    reference = integer_weights(Net())
    seen = [None] * size
    for step in range(2 + size - 1):
        reference.zero_grad()
        active = [r for r in range(size) if step < 2 + r]
        for r in active:
            x, y = batch(r)
            (squared_error(reference(x), y) / size).backward()
        for r in active:
            seen[r] = [p.grad.clone() for p in reference.parameters()]
        with torch.no_grad():
            for i, p in enumerate(reference.parameters()):
                p -= lr * seen[owners[i]][i]
    # Not exact: after the first step weights are no integers, and the sums are grouped by rank.
    for p, q in zip(ddp.parameters(), reference.parameters()):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-5)


def test_join_of_ddp_and_optimizer():
    run(uneven, 2)


class Counter(Joinable):
    """The example of the Join tutorial: counts inputs of all ranks."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.count = torch.zeros(1)

    def __call__(self):
        Join.notify_join_context(self)
        one = torch.ones(1)
        dist.all_reduce(one, group=self.group)
        self.count += one

    def join_hook(self, **kwargs):
        counter = self

        class Hook(JoinHook):
            def main_hook(self):
                dist.all_reduce(torch.zeros(1), group=counter.group)

            def post_hook(self, is_last_joiner):
                rank = torch.tensor([dist.get_rank() if is_last_joiner else -1])
                dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=counter.group)
                dist.broadcast(counter.count, src=rank.item(), group=counter.group)

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group


def counting(rank, size):
    counter = Counter(dist.group.WORLD)
    with Join([counter]):
        for _ in range(3 + 2 * rank):
            counter()
    assert counter.count.item() == sum(3 + 2 * r for r in range(size))


def test_join_of_a_custom_class():
    run(counting, 4)


def overlapped(rank, size):
    """The optimizer steps on a bucket as soon as it is reduced, inside DDP's hook."""
    ddp = DDP(integer_weights(Net()), gradient_as_bucket_view=True)
    plain = DDP(integer_weights(Net()))
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.SGD, lr=2.0**-6, overlap_with_ddp=True
    )
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))
    reference = torch.optim.SGD(plain.parameters(), lr=2.0**-6)
    x, y = batch(rank)
    steps = 4
    for _ in range(steps):
        squared_error(ddp(x), y).backward()
        ddp.zero_grad()
    # The first two passes only build DDP's buckets: PyTorch skips the step in them.
    for _ in range(steps - 2):
        reference.zero_grad()
        squared_error(plain(x), y).backward()
        reference.step()
    assert_same(ddp.parameters(), plain.parameters())


def test_optimizer_overlapped_with_ddp():
    if backend() == "gloo":
        pytest.skip("PyTorch refuses this hook over gloo by name, as it may hang there (pytorch issue 62300)")
    run(overlapped, 2)
