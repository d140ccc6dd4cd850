import pytest
import torch.distributed as dist

from .cases import finish
from .selection import SECTIONS


def broadcast(case, group):
    data = group.placed_input(case)
    finish(dist.broadcast(data.tensor, group.root(case), group.pg, case.async_op), case)
    yield "tensor", data, group.input(case, case.root % group.size)


def broadcast_from_group_rank(case, group):
    data = group.placed_input(case)
    work = dist.broadcast(data.tensor, group=group.pg, async_op=case.async_op, group_src=case.root % group.size)
    finish(work, case)
    yield "tensor", data, group.input(case, case.root % group.size)


@pytest.mark.parametrize("section", SECTIONS)
def test_broadcast(conform, section):
    conform(broadcast, section)


def test_broadcast_from_group_rank(conform):
    conform(broadcast_from_group_rank, "contiguous")
