"""torch.distributed.pipelining: stages exchange activations and gradients point to point."""

import pytest
import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)

from .models import assert_same, grads, integer_weights, integers
from .spawn import run

MICROBATCHES = 4


class Chain(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            integer_weights(torch.nn.Linear(6, 6), seed=10 + 2 * i) for i in range(layers)
        )
        # Ones and zeros, so that four layers in a row stay within float32's integers.
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(0, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def inputs():
    return integers(8, 6, seed=1, low=0, high=2), integers(8, 6, seed=2)


def linear_loss(output, label):
    """Linear in the output, so that gradients stay small integers too."""
    return (output * label).sum()


def whole(layers):
    model = Chain(layers)
    x, y = inputs()
    output = model(x)
    linear_loss(output, y).backward()
    return model, output


def check(rank, last, output, losses, stages):
    reference, expected = whole(len(stages["all"]))
    if last:
        assert_same([output], [expected])
        assert sum(losses).item() == linear_loss(expected, inputs()[1]).item()
    for index, module in stages["mine"]:
        assert_same(grads(module), grads(reference.layers[index]))


def one_stage_per_rank(rank, size, schedule):
    module = Chain(size).layers[rank]
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    # scale_grads would divide by the number of microbatches, for losses that are means.
    steps = schedule(stage, n_microbatches=MICROBATCHES, loss_fn=linear_loss, scale_grads=False)
    x, y = inputs()
    losses, output = [], None
    if rank == 0:
        steps.step(x)
    elif rank == size - 1:
        output = steps.step(target=y, losses=losses)
    else:
        steps.step()
    check(rank, rank == size - 1, output, losses, {"all": range(size), "mine": [(rank, module)]})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_one_stage_per_rank(schedule, size):
    run(one_stage_per_rank, size, schedule)


def interleaved(rank, size):
    """Two stages on each rank: 0 and 2 on one, 1 and 3 on the other."""
    modules = Chain(2 * size).layers
    mine = [rank, rank + size]
    stages = [PipelineStage(modules[i], i, 2 * size, torch.device("cpu")) for i in mine]
    steps = ScheduleInterleaved1F1B(stages, n_microbatches=MICROBATCHES, loss_fn=linear_loss, scale_grads=False)
    x, y = inputs()
    losses, output = [], None
    if rank == 0:
        steps.step(x)
    else:
        output = steps.step(target=y, losses=losses)
    check(rank, rank == size - 1, output, losses, {"all": range(2 * size), "mine": [(i, modules[i]) for i in mine]})


def test_interleaved_stages():
    run(interleaved, 2)


def split_by_tracer(rank, size):
    """The model is traced and cut, not written as stages."""
    model = Chain(size)
    x, y = inputs()
    pipe = pipeline(model, mb_args=(x.chunk(MICROBATCHES)[0],), split_spec={"layers.1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    steps = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=linear_loss, scale_grads=False)
    if rank == 0:
        steps.step(x)
    else:
        output = steps.step(target=y)
        assert_same([output], [whole(size)[1]])
    reference, _ = whole(size)
    assert_same([p.grad for p in stage.submod.parameters()], grads(reference.layers[rank]))


def test_traced_model():
    run(split_by_tracer, 2)
