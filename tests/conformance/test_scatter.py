import pytest
import torch.distributed as dist

from .cases import finish
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


@pytest.mark.parametrize("section", SECTIONS)
def test_scatter(conform, section):
    conform(scatter, section)
