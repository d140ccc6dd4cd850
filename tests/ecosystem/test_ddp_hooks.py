"""DDP's communication hooks, model averaging and the optimizers built on them."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from .models import Net, assert_same, batch, grads, integer_weights, mean_gradients, squared_error
from .spawn import run


def gradients_with(hook, state, rank, passes=1):
    ddp = DDP(integer_weights(Net()))
    ddp.register_comm_hook(state, hook)
    for _ in range(passes):
        ddp.zero_grad()
        x, y = batch(rank)
        squared_error(ddp(x), y).backward()
    return grads(ddp)


def exact_hooks(rank, size):
    expected = mean_gradients(integer_weights(Net()), size)
    assert_same(gradients_with(default_hooks.allreduce_hook, None, rank), expected)
    assert_same(gradients_with(default_hooks.allreduce_hook, dist.group.WORLD, rank, passes=2), expected)

    alone = integer_weights(Net())
    x, y = batch(rank)
    squared_error(alone(x), y).backward()
    assert_same(gradients_with(debugging_hooks.noop_hook, None, rank), grads(alone))

    # PowerSGD and post-localSGD begin as plain all_reduce.
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
    assert_same(gradients_with(powerSGD_hook.powerSGD_hook, state, rank), expected)
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.new_group(list(range(size))), start_localSGD_iter=10
    )
    assert_same(gradients_with(post_localSGD_hook.post_localSGD_hook, state, rank), expected)


def test_hooks_with_exact_results():
    run(exact_hooks, 2)


def compressing_hooks(rank, size):
    """Gradients are rounded to the narrow type, divided, and only then summed: done here by hand."""

    def bf16_compress(state, bucket):
        # DDP refuses the hook by its name where there is no NCCL; the backend carries bfloat16 all the same.
        return default_hooks.bf16_compress_hook(state, bucket)

    def bf16_compress_all_reduce(state, bucket):
        return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)

    fp16_compress_all_reduce = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    for narrow, hooks in (
        (torch.float16, (default_hooks.fp16_compress_hook, fp16_compress_all_reduce)),
        (torch.bfloat16, (bf16_compress, bf16_compress_all_reduce)),
    ):
        expected = None
        for r in range(size):
            model = integer_weights(Net())
            x, y = batch(r)
            squared_error(model(x), y).backward()
            parts = [(g.to(narrow) / size).float() for g in grads(model)]
            # Two addends, each exact in float32, summed and rounded once to the narrow type.
            expected = parts if expected is None else [e + p for e, p in zip(expected, parts)]
        expected = [e.to(narrow).float() for e in expected]
        for hook in hooks:
            assert_same(gradients_with(hook, None, rank), expected)


def test_compressing_hooks():
    run(compressing_hooks, 2)


def power_sgd(rank, size):
    """A gradient of rank one is what a rank-1 approximation keeps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 16, bias=False)
    ddp = DDP(model)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, use_error_feedback=True, min_compression_rate=1
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    column = torch.linspace(1, 2, 32)
    for step in range(4):
        ddp.zero_grad()
        (ddp((column * (1 + rank))[None]).sum()).backward()
        expected = torch.ones(16, 1) * column * (sum(1 + r for r in range(size)) / size)
        # Not exact: P and Q are made orthonormal in float32.
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-4, atol=1e-4)
    same = [torch.empty_like(model.weight.grad) for _ in range(size)]
    dist.all_gather(same, model.weight.grad)
    assert all(torch.equal(same[0], s) for s in same)


def test_power_sgd():
    run(power_sgd, 2)


def local_sgd(rank, size):
    """Four ranks in two pairs. Three global steps, then local ones in the pair, averaged each second step."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    ddp = DDP(model)
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=pairs[rank // 2], start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(ddp.parameters(), lr=1.0), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    seen = []
    for _ in range(6):
        optimizer.zero_grad()
        ddp(torch.tensor([[float(rank)]])).sum().backward()
        optimizer.step()
        seen.append(model.weight.item())

    # By hand, in exact numbers: the gradient of rank r is r; 0.5 and 2.5 are the pairs' means, 1.5 the mean of all.
    weights, expected = [0.0] * size, []
    for step in range(6):
        for r in range(size):
            weights[r] -= 1.5 if step < 2 else (0.5 if r < 2 else 2.5)
        # The averager averages from its warm-up's end on, each second step.
        if step >= 2 and (step - 2) % 2 == 0:
            weights = [sum(weights) / size] * size
        expected.append(weights[rank])
    assert seen == expected, (seen, expected)


def test_post_local_sgd():
    run(local_sgd, 4)


def averagers(rank, size):
    parameter = torch.nn.Parameter(torch.tensor([float(rank)]))
    parameter.grad = torch.zeros(1)  # averagers pass over parameters that have none
    averager = PeriodicModelAverager(period=4, warmup_steps=1)
    seen = []
    for step in range(6):
        with torch.no_grad():
            parameter.fill_(float(rank + step))
        averager.average_parameters([parameter])
        seen.append(parameter.item())
    mean = sum(range(size)) / size
    assert seen == [float(rank + s) if s not in (1, 5) else mean + s for s in range(6)], seen

    # Pairs are averaged each second step, all ranks each fourth.
    averager = HierarchicalModelAverager(period_group_size_dict={2: 2, 4: 4}, warmup_steps=0)
    seen = []
    for step in range(5):
        with torch.no_grad():
            parameter.fill_(float(rank))
        averager.average_parameters([parameter])
        seen.append(parameter.item())
    pair = (rank // 2) * 2 + 0.5
    assert seen == [mean, float(rank), pair, float(rank), mean], seen


def test_model_averagers():
    run(averagers, 4)


def averaged_training(rank, size):
    """SGD is linear in the gradient: averaging parameters each step equals averaging gradients."""
    model = integer_weights(Net())
    reference = copy.deepcopy(model)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    x, y = batch(rank)
    squared_error(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    averager.average_parameters(list(model.parameters()))
    expected = [p.detach() - 0.5 * g for p, g in zip(reference.parameters(), mean_gradients(reference, size))]
    assert_same(model.parameters(), expected)


def test_averaged_parameters_equal_averaged_gradients():
    run(averaged_training, 2)
