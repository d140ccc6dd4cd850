import pytest
import torch.distributed as dist

from .cases import finish, uneven_count
from .selection import SECTIONS


def scatter(case, group):
    root = group.root(case)
    data = []
    if group.ranks[group.me] == root:
        data = [group.placed_input(case, start=i * case.count) for i in range(group.size)]
    output = group.output(case)
    work = dist.scatter(output.tensor, [d.tensor for d in data] or None, root, group.pg, case.async_op)
    finish(work, case)
    yield "output", output, group.input(case, case.root % group.size, start=group.me * case.count)
    for i, part in enumerate(data):
        yield f"input {i}", part, group.input(case, start=i * case.count)


def scatter_uneven(case, group):
    root, mine = case.root % group.size, uneven_count(case, group.me)
    data = []
    if group.me == root:
        data = [group.placed_input(case, uneven_count(case, i)) for i in range(group.size)]
    output = group.output(case, mine)
    finish(
        dist.scatter(output.tensor, [d.tensor for d in data] or None, group.ranks[root], group.pg, case.async_op), case
    )
    yield "output", output, group.input(case, root, mine)
    for i, part in enumerate(data):
        yield f"input {i}", part, group.input(case, None, uneven_count(case, i))


@pytest.mark.parametrize("section", SECTIONS)
def test_scatter(conform, section):
    conform(scatter, section)


@pytest.mark.parametrize("section", SECTIONS)
def test_scatter_uneven(conform, section):
    conform(scatter_uneven, section)
