import pytest
import torch
import torch.distributed as dist

from . import reference
from .cases import Case, check, finish
from .cases import group as make_group
from .selection import SECTIONS


def reduce_scatter(case, group):
    data = [group.placed_input(case, start=i * case.count) for i in range(group.size)]
    output = group.output(case)
    finish(
        dist.reduce_scatter(output.tensor, [d.tensor for d in data], case.reduce_op(), group.pg, case.async_op), case
    )
    yield "output", output, group.reduced(case, start=group.me * case.count)
    for i, part in enumerate(data):
        yield f"input {i}", part, group.input(case, start=i * case.count)


def reduce_scatter_tensor(case, group):
    data = group.placed_input(case, group.size * case.count)
    output = group.output(case)
    finish(dist.reduce_scatter_tensor(output.tensor, data.tensor, case.reduce_op(), group.pg, case.async_op), case)
    yield "output", output, group.reduced(case, start=group.me * case.count)
    yield "input", data, group.input(case, count=group.size * case.count)


@pytest.mark.parametrize("section", SECTIONS)
def test_reduce_scatter(conform, section):
    conform(reduce_scatter, section, reducing=True)


@pytest.mark.parametrize("section", SECTIONS)
def test_reduce_scatter_tensor(conform, section):
    conform(reduce_scatter_tensor, section, reducing=True)


def _stacked():
    g = make_group()
    case = Case(torch.float32, 6, "SUM", "mild")
    output = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(output, g.input(case, count=6 * g.size).view(g.size, 2, 3))
    return list(filter(None, [reference.difference(output, g.reduced(case, start=6 * g.me))]))


def test_from_stacked_input(ranks, beyond_gloo):
    beyond_gloo("does not stack")
    check(ranks, _stacked)


def _output_inside_input(counts, kind):
    """The in-place form: the result replaces this rank's part of the input."""
    g = make_group()
    wrong = []
    for count in counts:
        case = Case(torch.float32, count, "SUM", kind)
        data = g.input(case, count=g.size * count)
        output = data[g.me * count : (g.me + 1) * count]
        dist.reduce_scatter_tensor(output, data)
        wrong += filter(None, [reference.difference(output, g.reduced(case, start=g.me * count))])
    return wrong


def test_output_inside_input(ranks, backend):
    kind = "mild" if backend == "gloo" else "rough"
    check(ranks, _output_inside_input, (0, 1, 7, 5000, 50001, 300007), kind)
