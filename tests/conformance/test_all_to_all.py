import pytest
import torch.distributed as dist

from .cases import finish
from .selection import SECTIONS


def all_to_all(case, group):
    data = [group.placed_input(case, start=i * case.count) for i in range(group.size)]
    outputs = [group.output(case) for _ in group.ranks]
    finish(dist.all_to_all([o.tensor for o in outputs], [d.tensor for d in data], group.pg, case.async_op), case)
    for i, output in enumerate(outputs):
        yield f"output {i}", output, group.input(case, i, start=group.me * case.count)


def split(case, source, target):
    """Elements from one position to another: uneven, some 0; multiples of 7, so that they are rows of matrices."""
    return 7 * ((case.count // 7 + 3 * source + 5 * target) % (case.count // 7 + 4))


def split_start(case, source, target):
    return sum(split(case, source, t) for t in range(target))


def all_to_all_uneven(case, group):
    me = group.me
    data = [group.placed_input(case, split(case, me, i), split_start(case, me, i)) for i in range(group.size)]
    outputs = [group.output(case, split(case, i, me)) for i in range(group.size)]
    finish(dist.all_to_all([o.tensor for o in outputs], [d.tensor for d in data], group.pg, case.async_op), case)
    for i, output in enumerate(outputs):
        yield f"output {i}", output, group.input(case, i, split(case, i, me), split_start(case, i, me))


@pytest.mark.parametrize("section", SECTIONS)
def test_all_to_all(conform, section):
    conform(all_to_all, section)


@pytest.mark.parametrize("section", SECTIONS)
def test_all_to_all_uneven(conform, section):
    conform(all_to_all_uneven, section)
