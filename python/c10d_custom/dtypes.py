"""The one table of dtypes and reduce ops, shared with backend/shm/reduce.h."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from .errors import UsageError

RedOp: Any = ReduceOp.RedOpType  # torch's types know no members of it
_ARITHMETIC = ("SUM", "AVG", "PRODUCT")
_ORDERED = _ARITHMETIC + ("MIN", "MAX")
_INTEGER = _ORDERED + ("BAND", "BOR", "BXOR")
_REAL = _ORDERED + ("PREMUL_SUM",)
_COMPLEX = _ARITHMETIC + ("PREMUL_SUM",)
_BOOL = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

# Names by what they can be reduced with, none of the last: they only move. The native code of a dtype is its place
# among all.
_NAMES = (
    (_INTEGER, "uint8 int8 int16 int32 int64 uint16 uint32 uint64"),
    (_BOOL, "bool"),
    (_REAL, "float16 bfloat16 float32 float64"),
    (_COMPLEX, "complex32 complex64 complex128"),
    (_REAL, "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"),
    (_COMPLEX, "bcomplex32"),  # from torch 2.15 on: two bfloat16
    ((), "float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2 qint8 quint8 qint32 quint4x2 quint2x4"),
)
TABLE: list[tuple[str, tuple[str, ...]]] = [(name, reduces) for reduces, names in _NAMES for name in names.split()]


class DType:
    """A torch dtype as the native core knows it. ``code``: the core's, of backend/shm/reduce.h; ``reduces``: the names
    of the reduce ops that have a meaning for it."""

    __slots__ = ("name", "code", "item_bytes", "reduces")

    def __init__(self, name: str, code: int, item_bytes: int, reduces: tuple[str, ...]) -> None:
        self.name, self.code, self.item_bytes, self.reduces = name, code, item_bytes, reduces


BY_DTYPE = {
    dtype: DType(name, code, dtype.itemsize, reduces)
    for code, (name, reduces) in enumerate(TABLE)
    if (dtype := getattr(torch, name, None)) is not None
}
BY_CODE = {d.code: d for d in BY_DTYPE.values()}
SUM, AVG, PREMUL_SUM = (int(getattr(RedOp, n)) for n in ("SUM", "AVG", "PREMUL_SUM"))
REDUCE_OPS = {int(member): name for name, member in RedOp.__members__.items() if name != "UNUSED"}


# By the code of a dtype: it and the size of an item as the native core packs them; and, in a byte, a bit for each of
# torch's first eight reduce ops that has a meaning for it: 1 << its code, which is the hash of a ReduceOp, too. The
# fast path takes no others: PREMUL_SUM, the ninth, needs a factor.
PACKED = {d.code: d.code | d.item_bytes << 16 for d in BY_CODE.values()}
REDUCES = {
    d.code: sum(1 << code for code, name in REDUCE_OPS.items() if name in d.reduces and code < 8)
    for d in BY_CODE.values()
}
_CODES = {member: int(member) for member in RedOp.__members__.values()}


def lookup(dtype: torch.dtype) -> DType:
    """The DType of a torch dtype; UsageError for one that this backend cannot carry."""
    try:
        return BY_DTYPE[dtype]
    except KeyError:
        raise UsageError(f"tensors of {dtype} cannot be communicated: their elements are smaller than a byte") from None


def split_op(op: Any) -> tuple[int, float | torch.Tensor | None]:
    """(code, factor) of a ReduceOp, a RedOpType or its C++ twin. The factor is that of PREMUL_SUM,
    a number or a tensor, otherwise None."""
    kind = getattr(op, "op", op)
    code = _CODES.get(kind)
    if code is None:
        raise UsageError(f"reduce op {op!r} is not known")
    return code, op.__getstate__()[1] if kind == RedOp.PREMUL_SUM else None


def check_reduce(dtype: DType, code: int) -> None:
    """Raises UsageError where the reduce op has no meaning for the DType."""
    name = REDUCE_OPS.get(code, str(code))
    if name not in dtype.reduces:
        raise UsageError(
            f"reduce op {name} has no meaning for torch.{dtype.name}; "
            + (
                f"it can be reduced with {', '.join(dtype.reduces)}"
                if dtype.reduces
                else "tensors of this dtype can be moved but not reduced"
            )
        )
