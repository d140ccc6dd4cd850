"""What gloo cannot do: kept out when the suite is tried on it, so that all that is left must pass."""

import torch

from . import values

_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    *values.COMPLEX,
)
_ONE_TENSOR = ("all_gather_into_tensor", "reduce_scatter_tensor")
_UNEVEN = ("all_gather_uneven", "all_to_all_uneven", "gather_uneven", "scatter_uneven")
# It copies memory of a tensor's numel, in the order of the addresses, whatever the strides.
_LAYOUTS = ("contiguous", "offset", "scalar")


def lacks(collective, case, group_size):
    """Why gloo cannot run a case, or None."""
    if case.dtype not in _DTYPES:
        return "does not know the dtype"
    if case.layout not in _LAYOUTS:
        return "ignores strides"
    if collective in _UNEVEN:
        return "wants tensors of one size"
    if collective in ("gather", "functional_all_to_all") and case.dtype in values.COMPLEX:
        return "takes no complex tensors there"
    if collective in _ONE_TENSOR and case.layout == "scalar":
        return "wants the chunks of the one tensor in the shape of the other"
    return case.op and _lacks_reduction(collective, case, group_size)


def _lacks_reduction(collective, case, group_size):
    if case.op == "PREMUL_SUM":
        return "has no PREMUL_SUM"
    if case.op == "AVG" and case.dtype in values.INTEGERS:
        return "has no integer average"
    if case.op == "AVG" and case.dtype in values.COMPLEX and "all_reduce" not in collective:
        return "multiplies by 1/n instead of dividing"
    if case.op == "PRODUCT" and case.dtype in values.COMPLEX:
        return "has no complex product"
    if case.op == "SUM" and case.dtype is torch.bool:
        return "adds bools to bytes other than 0 and 1"
    if case.kind == "special" and case.op in ("MIN", "MAX"):
        return "loses nans"
    if case.kind == "special" and case.op == "AVG" and case.dtype is torch.float16:
        return "overflows before it divides"
    inexact = case.dtype not in values.INTEGERS and case.kind in ("rough", "special") and case.op not in ("MIN", "MAX")
    if inexact and group_size > 2:
        return "adds in an order of its own"
    return None
