import pytest
import torch.distributed as dist

from .cases import finish, uneven_count
from .selection import SECTIONS


def gather(case, group):
    root = group.root(case)
    data = group.placed_input(case)
    outputs = [group.output(case) for _ in group.ranks] if group.ranks[group.me] == root else []
    work = dist.gather(data.tensor, [o.tensor for o in outputs] or None, root, group.pg, case.async_op)
    finish(work, case)
    for i, output in enumerate(outputs):
        yield f"output {i}", output, group.input(case, i)
    yield "input", data, group.input(case)


def gather_uneven(case, group):
    root = group.root(case)
    data = group.placed_input(case, uneven_count(case, group.me))
    outputs = []
    if group.ranks[group.me] == root:
        outputs = [group.output(case, uneven_count(case, i)) for i in range(group.size)]
    finish(dist.gather(data.tensor, [o.tensor for o in outputs] or None, root, group.pg, case.async_op), case)
    for i, output in enumerate(outputs):
        yield f"output {i}", output, group.input(case, i, uneven_count(case, i))
    yield "input", data, group.input(case, None, uneven_count(case, group.me))


@pytest.mark.parametrize("section", SECTIONS)
def test_gather(conform, section):
    conform(gather, section)


@pytest.mark.parametrize("section", SECTIONS)
def test_gather_uneven(conform, section):
    conform(gather_uneven, section)
