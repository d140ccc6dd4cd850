"""The CPU engine's results, which kernels are held to."""

import ctypes

import torch

from c10d_custom import dtypes
from c10d_custom.native import OK, lib
from conformance import reference
from conformance.values import same_bytes

NATIVE_FLOATS = {"float32", "float64", "complex64", "complex128"}


def engine(dtype, redop, sources, count, factors):
    """The CPU engine's result of tensors of bytes."""
    result = torch.empty(count * dtype.item_bytes, dtype=torch.uint8)
    addresses = (ctypes.c_void_p * len(sources))(*[s.data_ptr() for s in sources])
    doubles = (ctypes.c_double * len(factors))(*factors) if factors else None
    assert lib.c10d_reduce(dtype.code, redop, result.data_ptr(), addresses, len(sources), count, doubles) == OK
    return result


def torch_dtype(dtype):
    return getattr(torch, dtype.name)


def same(dtype, redop, got, want):
    """None, or what differs. What a NaN of arithmetic in float or double looks like is the processor's matter;
    every other bit must agree, those of NaNs in narrower formats or passed through by MIN and MAX too."""
    if dtype.name in NATIVE_FLOATS and dtypes.REDUCE_OPS[redop] not in ("MIN", "MAX"):
        return reference.difference(got.clone().view(torch_dtype(dtype)), want.view(torch_dtype(dtype)))
    return None if same_bytes(got, want) else f"{int((got != want).sum())} bytes differ"
