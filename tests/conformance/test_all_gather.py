import dataclasses

import pytest
import torch
import torch.distributed as dist

from . import reference, values
from .cases import check, finish, uneven_count
from .cases import group as make_group
from .selection import SECTIONS
from .strides import Placed


def all_gather(case, group):
    data = group.placed_input(case)
    outputs = [group.output(case) for _ in group.ranks]
    finish(dist.all_gather([o.tensor for o in outputs], data.tensor, group.pg, case.async_op), case)
    for i, output in enumerate(outputs):
        yield f"output {i}", output, group.input(case, i)
    yield "input", data, group.input(case)


def all_gather_uneven(case, group):
    data = group.placed_input(case, uneven_count(case, group.me))
    outputs = [group.output(case, uneven_count(case, i)) for i in range(group.size)]
    finish(dist.all_gather([o.tensor for o in outputs], data.tensor, group.pg, case.async_op), case)
    for i, output in enumerate(outputs):
        yield f"output {i}", output, group.input(case, i, uneven_count(case, i))


def everyones_input(case, group):
    parts = [values.raw(group.input(case, i)) for i in range(group.size)]
    return torch.cat(parts).view(case.dtype)


def all_gather_into_tensor(case, group):
    data = group.placed_input(case)
    output = group.output(case, group.size * case.count)
    finish(dist.all_gather_into_tensor(output.tensor, data.tensor, group.pg, case.async_op), case)
    yield "output", output, everyones_input(case, group)
    yield "input", data, group.input(case)


def all_gather_coalesced(case, group):
    """Tensors of three lengths in one call. The async form gives a Future."""
    cases = [dataclasses.replace(case, count=count) for count in (case.count, 7, case.count // 2)]
    data = [group.placed_input(c) for c in cases]
    outputs = [[group.output(c) for c in cases] for _ in group.ranks]
    future = dist.all_gather_coalesced(
        [[o.tensor for o in row] for row in outputs], [d.tensor for d in data], group.pg, case.async_op
    )
    finish(future, case)
    for i, row in enumerate(outputs):
        for c, output in zip(cases, row):
            yield f"output {i} of {c.count}", output, group.input(c, i)


@pytest.mark.parametrize("section", SECTIONS)
def test_all_gather(conform, section):
    conform(all_gather, section)


@pytest.mark.parametrize("section", SECTIONS)
def test_all_gather_uneven(conform, section):
    conform(all_gather_uneven, section)


@pytest.mark.parametrize("section", SECTIONS)
def test_all_gather_into_tensor(conform, section):
    conform(all_gather_into_tensor, section)


@pytest.mark.parametrize("section", ["small", "contiguous", "strided", "offset"])
def test_all_gather_coalesced(conform, section):
    conform(all_gather_coalesced, section)


def _stacked():
    g = make_group()
    wrong = []
    for dtype, name in ((torch.float32, "all_gather_into_tensor"), (torch.bfloat16, "all_gather_single")):
        if not hasattr(dist, name):
            continue  # torch 2.11
        mine = values.inputs(dtype, g.me, "bits", None, 6).view(2, 3)
        output = torch.zeros(g.size, 2, 3, dtype=dtype)
        getattr(dist, name)(output, mine)
        want = torch.stack([values.inputs(dtype, r, "bits", None, 6).view(2, 3) for r in g.ranks])
        wrong += filter(None, [reference.difference(output, want)])
    return wrong


def test_into_stacked_output(ranks, beyond_gloo):
    beyond_gloo("does not stack")
    check(ranks, _stacked)


def _input_inside_output(counts):
    """The in-place form: this rank's input already lies where its output belongs."""
    g = make_group()
    wrong = []
    for count in counts:
        everyone = [values.inputs(torch.float32, r, "bits", None, count) for r in g.ranks]
        output = Placed(torch.zeros(g.size * count), "offset")
        mine = output.tensor[g.me * count : (g.me + 1) * count]
        mine.copy_(everyone[g.me])
        dist.all_gather_into_tensor(output.tensor, mine)
        wrong += filter(None, [reference.difference(output.tensor, torch.cat(everyone)), output.stray_write()])
        output = torch.zeros(g.size * count)
        chunks = list(output.chunk(g.size)) if count else [output] * g.size
        chunks[g.me].copy_(everyone[g.me])
        dist.all_gather(chunks, chunks[g.me])
        wrong += filter(None, [reference.difference(output, torch.cat(everyone))])
    return wrong


def test_input_inside_output(ranks):
    check(ranks, _input_inside_output, (0, 1, 7, 5000, 50001, 300007))
