"""What the extension (backend/python) is to do, in Python: which tensors it takes, and what it asks the core."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Any

import torch

from c10d_custom.call import AT_ROOT, ELSEWHERE, SHAPES, Op
from c10d_custom.dtypes import BY_DTYPE, PACKED, REDUCES
from c10d_custom.native import LISTED_INPUTS, LISTED_OUTPUTS, SLOW_PATH
from c10d_custom.native.direct import _CPU, _PLAIN, TYPES, count_changes, keys_of, nobody_watches

_Side = tuple[int | bytes, int, int, bool]  # address or addresses, elements of a part, dtype's code, whether a list


def _is_plain(t: torch.Tensor) -> bool:
    if type(t) not in TYPES or (keys := keys_of(t)) & ~_PLAIN or keys & _CPU != _CPU:
        return False
    return not (t.requires_grad and torch.is_grad_enabled())


def raw_tensor(t: torch.Tensor) -> tuple[int, int, int] | None:
    if (
        _is_plain(t)
        and t.layout is torch.strided
        and t.is_contiguous()
        and (dtype := BY_DTYPE.get(t.dtype))
        and (t.data_ptr() or not t.numel())
    ):
        return t.data_ptr(), t.numel(), dtype.code
    return None


class FastCollective:
    """Of native.direct."""

    def __init__(
        self, function: Callable[..., int], handle: int, rank: int, size: int, submit: Callable[..., int] | None = None
    ) -> None:
        self._function, self._submit, self._handle = function, submit, handle
        self._rank, self._size = rank, size

    def close(self) -> None:
        self._handle = 0

    def run(self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int) -> int:
        found = self._find(op, source, target, root, redop)
        return self._function(self._handle, *found, nanoseconds) if found else SLOW_PATH

    def submit(
        self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, ticket: list[int]
    ) -> int:
        if not self._submit or not (found := self._find(op, source, target, root, redop)):
            return SLOW_PATH
        at = ctypes.c_void_p()
        try:
            return self._submit(self._handle, *found, nanoseconds, ctypes.byref(at))
        finally:
            if at.value:
                ticket.append(at.value)

    def _find(self, op: int, source: Any, target: Any, root: int, redop: Any) -> tuple[Any, ...] | None:
        """(kind, root, input, output, count), as the core takes them; None for the slow path."""
        if not nobody_watches():
            return None
        shape, here = SHAPES[Op(op)], AT_ROOT if root == self._rank else ELSEWHERE
        if not self._handle or not (0 <= root < self._size if shape.rooted else root == -1):
            return None
        has_source, has_target = bool(shape.reads & here), bool(shape.writes & here)
        if not has_source and not has_target:
            return op << 24 | 1 << 16, root, None, None, 0
        if not has_source and shape.from_each and source or not has_target and shape.to_each and target:
            return None  # lists that are for the root alone
        sides = [
            self._parts(tensors) if each else _part(tensors)
            for there, each, tensors in ((has_source, shape.from_each, source), (has_target, shape.to_each, target))
            if there
        ]
        if not sides[0] or not sides[-1] or sides[0][1:3] != sides[-1][1:3] or not sides[0][1]:
            return None
        first, count, code, _ = sides[0]
        last = sides[-1][0]
        kind = op << 24 | PACKED[code]
        if shape.reduces:
            if (number := hash(redop)) not in range(8) or not REDUCES[code] >> number & 1:
                return None
            kind |= number << 8
        listed = has_target and sides[-1][3]
        if shape.counted and has_target and (listed or not (shape.from_each and shape.to_each)):
            try:
                count_changes(_flat(target))
            except RuntimeError:
                return None
        if has_source and sides[0][3]:
            kind |= LISTED_INPUTS
        if listed:
            kind |= LISTED_OUTPUTS
        return kind, root, first if has_source else None, last if has_target else None, count

    def _parts(self, tensors: Any) -> _Side | None:
        if isinstance(tensors, list) and len(tensors) == 1 and isinstance(tensors[0], list):
            tensors = tensors[0]
        if not isinstance(tensors, list):
            found = raw_tensor(tensors)
            if not found or not tensors.dim() or not tensors.size(0) or tensors.size(0) % self._size:
                return None
            return found[0], found[1] // self._size, found[2], False
        each = [f for t in tensors if (f := raw_tensor(t))]
        if not len(each) == len(tensors) == self._size or any(f[1:] != each[0][1:] for f in each):
            return None
        return array("Q", [f[0] for f in each]).tobytes(), each[0][1], each[0][2], True


def _part(tensors: Any) -> _Side | None:
    found = raw_tensor(tensors[0] if isinstance(tensors, list) and len(tensors) == 1 else tensors)
    return found and (*found, False)


def _flat(tensors: Any) -> list[Any]:
    return [t for part in tensors for t in _flat(part)] if isinstance(tensors, list) else [tensors]
