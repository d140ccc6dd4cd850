"""Tensors of which the core needs no more than the address, the number of elements and the dtype: contiguous ones of
the CPU, whose bytes are their values, of no class of somebody's own, and such that autograd need not be told.

`raw_tensor(t)` is (address, elements, dtype's code) of such a tensor, else None. In C where that can be had:
backend/python/raw_tensor.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dtypes import BY_DTYPE
from . import torch_inside

RawTensor = Callable[[Any], tuple[int, int, int] | None]

_STRIDED = torch.strided
# DLPack's code and bits of torch's dtypes, those that it has.
_DLPACK = {
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "uint64": (1, 64),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "complex32": (5, 32),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "bool": (6, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}


def in_python(t: torch.Tensor) -> tuple[int, int, int] | None:
    if (
        torch_inside.is_plain(t)
        and t.layout is _STRIDED
        and t.is_contiguous()
        and (dtype := BY_DTYPE.get(t.dtype))
        and (t.data_ptr() or not t.numel())
    ):
        return t.data_ptr(), t.numel(), dtype.code
    return None


def _in_c() -> RawTensor:
    from ._fast import raw_tensor, set_up  # see setup.py for when it is not there

    if not torch_inside.in_c:
        raise ImportError("this torch does not show C what its tensors are")
    known = bytes(n for dtype in BY_DTYPE.values() if dtype.name in _DLPACK for n in (*_DLPACK[dtype.name], dtype.code))
    set_up(torch.Tensor.__dlpack_c_exchange_api__, known)
    return raw_tensor


try:
    raw_tensor = _in_c()
except (ImportError, AttributeError, ValueError):  # not built, or a torch that has no such exchange
    raw_tensor = in_python
