import pytest
import torch.distributed as dist

from .cases import finish
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


@pytest.mark.parametrize("section", SECTIONS)
def test_gather(conform, section):
    conform(gather, section)
