import pytest
import torch.distributed as dist

from .cases import finish
from .selection import SECTIONS


def reduce(case, group):
    root = group.root(case)
    data = group.placed_input(case)
    work = dist.reduce(data.tensor, root, case.reduce_op(), group.pg, case.async_op)
    finish(work, case)
    if group.ranks[group.me] == root:
        yield "tensor at the root", data, group.reduced(case)
    elif dist.get_backend() != "gloo":  # whose tree uses the other ranks' tensors as room to work
        yield "tensor away from the root", data, group.input(case)


@pytest.mark.parametrize("section", SECTIONS)
def test_reduce(conform, section):
    conform(reduce, section, reducing=True)
