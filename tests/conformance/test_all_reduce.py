import pytest
import torch.distributed as dist

from .cases import finish
from .selection import SECTIONS


def all_reduce(case, group):
    data = group.placed_input(case)
    finish(dist.all_reduce(data.tensor, case.reduce_op(), group.pg, case.async_op), case)
    yield "tensor", data, group.reduced(case)


@pytest.mark.parametrize("section", [*SECTIONS, "medium"])
def test_all_reduce(conform, section):
    conform(all_reduce, section, reducing=True)
