"""Pairs of dtype and reduce op without a meaning raise on every rank, change nothing and break nothing."""

import pytest
import torch
import torch.distributed as dist

from . import reference, values
from .cases import Case, check
from .cases import group as make_group

pytestmark = pytest.mark.world_sizes(2, 4)  # what lies above the transports is the same for any number of ranks


def _call(name, data, op, async_op):
    size = dist.get_world_size()
    if name == "all_reduce":
        return dist.all_reduce(data, op, async_op=async_op)
    if name == "all_reduce_coalesced":
        return dist.all_reduce_coalesced([data], op, async_op=async_op)
    if name == "reduce":
        return dist.reduce(data, 0, op, async_op=async_op)
    output = values.tile(values.pattern(data.dtype, 0, "bits"), data.numel())
    if name == "reduce_scatter":
        return dist.reduce_scatter(output, [data] * size, op, async_op=async_op)
    wide = values.tile(values.pattern(data.dtype, 0, "bits"), size * data.numel())
    return dist.reduce_scatter_tensor(output, wide, op, async_op=async_op)


def _refused(name, count, async_op, pairs, clear):
    g = make_group()
    wrong = []
    for dtype, op in pairs:
        case = Case(dtype, count, op, "bits" if dtype in values.MOVE_ONLY else "mild")
        what = f"{op} of {str(dtype)[6:]}"
        data = g.input(case)
        try:
            work = _call(name, data, case.reduce_op(), async_op)
            if work is not None:
                work.wait()
            wrong.append(f"{what} did not raise")
        except (ValueError, TypeError, RuntimeError) as error:
            # Torch itself refuses some of complex, without naming the dtype.
            if clear and not (op in str(error) and (str(dtype)[6:] in str(error) or "complex" in str(error))):
                wrong.append(f"{what}: the error names not both: {type(error).__name__}: {error}")
        if reference.difference(data, g.input(case)):
            wrong.append(f"{what} changed its tensor")
        total = torch.ones(5, dtype=torch.int64)
        dist.all_reduce(total)
        if total.tolist() != [g.size] * 5:
            wrong.append(f"after {what}, all_reduce gives {total.tolist()}")
    return wrong


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "name", ["all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
)
def test_refused(ranks, backend, name, async_op):
    # gloo notices that it cannot average bools after it has added them.
    pairs = [pair for pair in values.MEANINGLESS if backend != "gloo" or pair != (torch.bool, "AVG")]
    for count in (3, 200000):
        check(ranks, _refused, name, count, async_op, pairs, backend != "gloo")
