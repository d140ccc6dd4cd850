"""Collectives of plain CPU tensors in equal parts, as most are, from c10d's arguments to the core in one call. What a
Call and its checks cost is many times what the core takes for a few bytes, and where ranks share a core it is paid by
one after the other.

In C where that was built (backend/python/fast_collective.h), else here."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..call import AT_ROOT, ELSEWHERE, SHAPES, Op, Shape
from ..dtypes import PACKED, REDUCES
from . import LISTED_INPUTS, LISTED_OUTPUTS, SLOW_PATH, address_of
from .raw_tensor import in_python, raw_tensor
from .torch_inside import count_changes, nobody_watches

_Side = tuple[int | bytes, int, int, bool]  # address or addresses, elements of a part, dtype's code, whether a list


if TYPE_CHECKING:

    class FastCollective(Protocol):
        """Of one rank of one group. ``function``: c10d_fast_collective, or another of native.lib that takes and returns
        the same; ``handle``: its first argument; ``submit``: c10d_fast_submit, or None."""

        def __init__(self, function: Any, handle: int, rank: int, size: int, submit: Any = None, /) -> None: ...

        def run(self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, /) -> int:
            """Carries out ``op``, a native Op, in the calling thread. ``source``, ``target``: what it reads and writes,
            as c10d passes them: a tensor, or a list of one, for one part; a list of as many tensors as there are ranks,
            a list of such a list, or a tensor whose first dimension is cut into so many, for one part of each rank;
            where only the root has such a list, nothing or an empty list elsewhere; None for a barrier. ``root``: a
            group rank, -1 where there is none; ``redop``: a ReduceOp, looked at where the operation reduces;
            ``nanoseconds``: the time-out. Returns a status of native: OK; SLOW_PATH where nothing was begun, as the
            tensors are of another kind or make no sense; or what the function has returned."""

        def submit(
            self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, ticket: list[int], /
        ) -> int:
            """The same without waiting: OK, and the ticket's address is in the list; or SLOW_PATH."""

        def close(self) -> None:
            """Both take the slow path from now on. While nobody is in it."""


class InPython:
    """FastCollective without the extension."""

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
            found = in_python(tensors)
            if not found or not tensors.dim() or not tensors.size(0) or tensors.size(0) % self._size:
                return None
            return found[0], found[1] // self._size, found[2], False
        each = [f for t in tensors if (f := in_python(t))]
        if not len(each) == len(tensors) == self._size or any(f[1:] != each[0][1:] for f in each):
            return None
        return array("Q", [f[0] for f in each]).tobytes(), each[0][1], each[0][2], True


def _part(tensors: Any) -> _Side | None:
    found = in_python(tensors[0] if isinstance(tensors, list) and len(tensors) == 1 else tensors)
    return found and (*found, False)


def _flat(tensors: Any) -> list[Any]:
    return [t for part in tensors for t in _flat(part)] if isinstance(tensors, list) else [tensors]


def _in_order() -> list[Shape]:
    """The operations' Shapes by their numbers, which begin at 0."""
    return [SHAPES[Op(number)] for number in range(len(SHAPES))]


def _in_c() -> Callable[..., FastCollective]:
    from ._fast import FastCollective as InC  # not in every Python: see native
    from ._fast import set_up_kinds

    if raw_tensor is in_python:
        raise ImportError("this torch does not show C its tensors")
    of_code = {code: (PACKED[code] >> 16, REDUCES[code]) for code in PACKED}
    shapes = [
        s.reads | s.writes << 2 | s.from_each << 4 | s.to_each << 5 | s.reduces << 6 | s.counted << 7
        for s in _in_order()
    ]
    kinds = bytes(n for code in range(max(of_code) + 1) for n in of_code.get(code, (0, 0)))
    set_up_kinds(kinds, bytes(shapes))

    def make(function: Any, handle: int, rank: int, size: int, submit: Any = None) -> FastCollective:
        return InC(address_of(function), handle, rank, size, address_of(submit))

    return make


try:
    fast_collective: Callable[..., FastCollective] = _in_c()
except ImportError:
    fast_collective = InPython
