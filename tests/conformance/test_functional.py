"""torch.distributed._functional_collectives, which reach the group from C++."""

import pytest
import torch
import torch.distributed._functional_collectives as funcol

from . import reference
from .cases import Case, check
from .cases import group as make_group
from .strides import Placed
from .test_all_gather import everyones_input
from .test_all_to_all import split, split_start

pytestmark = pytest.mark.world_sizes(2, 4)  # what lies above the transports is the same for any number of ranks


def _done(tensor):
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def functional_all_reduce(case, group):
    data = group.placed_input(case)
    yield "result", _done(funcol.all_reduce(data.tensor, case.op.lower(), group.pg)), group.reduced(case)
    yield "input", data, group.input(case)


def functional_reduce_scatter(case, group):
    data = group.placed_input(case, group.size * case.count)
    result = funcol.reduce_scatter_tensor(data.tensor, case.op.lower(), 0, group.pg)
    yield "result", _done(result), group.reduced(case, start=group.me * case.count)


def functional_all_gather(case, group):
    data = group.placed_input(case)
    yield "result", _done(funcol.all_gather_tensor(data.tensor, 0, group.pg)), everyones_input(case, group)


def functional_broadcast(case, group):
    data = group.placed_input(case)
    result = funcol.broadcast(data.tensor, case.root % group.size, group.pg)
    yield "result", _done(result), group.input(case, case.root % group.size)
    yield "input", data, group.input(case)


def functional_all_to_all(case, group):
    me, everyone = group.me, range(group.size)
    sent, received = [split(case, me, i) for i in everyone], [split(case, i, me) for i in everyone]
    data = Placed(group.input(case, count=sum(sent)), "contiguous", device=group.device)
    result = _done(funcol.all_to_all_single(data.tensor, received, sent, group.pg))
    want = [group.input(case, i, split(case, i, me), split_start(case, i, me)).view(torch.uint8) for i in everyone]
    yield "result", result, torch.cat(want).view(case.dtype)


@pytest.mark.parametrize("section", ["small", "contiguous", "offset"])
@pytest.mark.world_sizes(2, 3, 4)
@pytest.mark.parametrize("perform", [functional_all_reduce, functional_reduce_scatter])
def test_reducing(conform, perform, section):
    conform(perform, section, reducing=True)


@pytest.mark.parametrize("section", ["small", "contiguous", "offset"])
@pytest.mark.world_sizes(2, 3, 4)
@pytest.mark.parametrize("perform", [functional_all_gather, functional_broadcast, functional_all_to_all])
def test_moving(conform, perform, section):
    conform(perform, section)


def _coalesced():
    g = make_group()
    cases = [Case(torch.float32, count, "SUM", "mild") for count in (5, 0, 70001)]
    data = [g.input(c) for c in cases]
    wide = [g.input(c, count=g.size * c.count) for c in cases]
    wrong = []
    for what, results, wanted in (
        ("all_reduce", funcol.all_reduce_coalesced(data, "sum", g.pg), [g.reduced(c) for c in cases]),
        ("all_gather", funcol.all_gather_into_tensor_coalesced(data, g.pg), [everyones_input(c, g) for c in cases]),
        (
            "reduce_scatter",
            funcol.reduce_scatter_tensor_coalesced(wide, "sum", [0] * 3, g.pg),
            [g.reduced(c, start=g.me * c.count) for c in cases],
        ),
    ):
        for c, result, want in zip(cases, results, wanted):
            problem = reference.difference(_done(result), want)
            if problem:
                wrong.append(f"{what} of {c.count}: {problem}")
    return wrong


def test_coalesced(ranks, beyond_gloo):
    beyond_gloo("has no coalesced forms")
    check(ranks, _coalesced)


def _dims_and_permutation():
    g = make_group()
    case = Case(torch.float32, 6 * g.size, "SUM", "mild")
    everyone = [g.input(case, i).view(3, 2 * g.size) for i in range(g.size)]
    mine, total = everyone[g.me], sum(everyone)
    shift = [(i + 1) % g.size for i in range(g.size)]
    wanted = {
        "all_gather_tensor, dim 1": (funcol.all_gather_tensor(mine, 1, g.pg), torch.cat(everyone, dim=1)),
        "reduce_scatter_tensor, dim 1": (
            funcol.reduce_scatter_tensor(mine, "sum", 1, g.pg),
            total.chunk(g.size, dim=1)[g.me],
        ),
        "permute_tensor": (funcol.permute_tensor(mine.view(-1), shift, g.pg), everyone[(g.me - 1) % g.size]),
        "all_reduce, list of ranks": (funcol.all_reduce(mine, "sum", list(g.ranks)), total),
    }
    return [
        f"{what}: {problem}"
        for what, (got, want) in wanted.items()
        if (problem := reference.difference(_done(got), want))
    ]


def test_dims_and_permutation(ranks):
    check(ranks, _dims_and_permutation)


def _unwaited():
    """Results that nobody waits for, or that are first used much later and in another order."""
    g = make_group()
    case = Case(torch.float32, 30000, "SUM", "mild")
    for _ in range(5):
        funcol.all_reduce(g.input(case), "sum", g.pg)
    results = [funcol.all_reduce(g.input(case) * i, "sum", g.pg) for i in range(1, 21)]
    return [
        f"result {i}"
        for i, result in reversed(list(enumerate(results, 1)))
        if reference.difference(_done(result), g.reduced(case) * i)
    ]


def test_unwaited(ranks):
    check(ranks, _unwaited)


def _gradients():
    """The autograd forms: each one's gradient is another collective."""
    g = make_group()
    mine = torch.full((g.size * 2,), float(g.me + 1), requires_grad=True)
    wrong = []

    def expect(what, want):
        if mine.grad is None or mine.grad.tolist() != want:
            wrong.append(f"{what}: gradient {mine.grad} instead of {want}")
        mine.grad = None

    weights = torch.arange(1.0, 1 + 2 * g.size**2)
    (funcol.all_gather_tensor_autograd(mine, 0, g.pg) * weights).sum().backward()
    expect("all_gather", (g.size * weights).chunk(g.size)[g.me].tolist())
    (funcol.reduce_scatter_tensor_autograd(mine, "sum", 0, g.pg) * float(g.me + 1)).sum().backward()
    expect("reduce_scatter", [float(1 + i // 2) for i in range(2 * g.size)])
    (funcol.all_to_all_single_autograd(mine, [2] * g.size, [2] * g.size, g.pg) * float(g.me + 1)).sum().backward()
    expect("all_to_all", [float(1 + i // 2) for i in range(2 * g.size)])
    return wrong


def test_gradients(ranks):
    check(ranks, _gradients)
