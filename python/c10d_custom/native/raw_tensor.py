"""Tensors of which the core needs no more than the address, the number of elements and the dtype: contiguous ones of
the CPU, whose bytes are their values, and of no class of somebody's own.

`raw_tensor(t)` is (address, elements, dtype's code) of such a tensor, else None. In C where that can be had:
backend/python/raw_tensor.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dtypes import BY_DTYPE

RawTensor = Callable[[Any], tuple[int, int, int] | None]

_TYPES = (torch.Tensor, torch.nn.Parameter)
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
        type(t) in _TYPES
        and t.is_cpu
        and t.layout is _STRIDED
        and t.is_contiguous()
        and not t.is_neg()
        and not t.is_conj()
        and (dtype := BY_DTYPE.get(t.dtype))
    ):
        return t.data_ptr(), t.numel(), dtype.code
    return None


def _in_c() -> RawTensor:
    from ._fast import raw_tensor, set_up  # see setup.py for when it is not there

    known = bytes(n for dtype in BY_DTYPE.values() if dtype.name in _DLPACK for n in (*_DLPACK[dtype.name], dtype.code))
    set_up(torch.Tensor.__dlpack_c_exchange_api__, _TYPES, torch.Tensor.is_neg, torch.Tensor.is_conj, known)
    return raw_tensor


try:
    raw_tensor = _in_c()
except (ImportError, AttributeError, ValueError):  # not built, or a torch that has no such exchange
    raw_tensor = in_python
