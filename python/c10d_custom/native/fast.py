"""The way of small calls of plain CPU tensors, from c10d's arguments to the core in C (backend/python): collectives in
equal parts, messages, and the tickets of both. What a Call and its checks cost is many times what the core takes for a
few bytes, and where ranks share a core it is paid by one after the other.

Where the extension cannot be had (a Python without a global interpreter lock, a torch that hides what its tensors are),
there is no such way, and tickets are held by ctypes: all calls go the slow path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..call import SHAPES, Op
from ..dtypes import BY_DTYPE, PACKED, REDUCES
from . import PENDING, address_of, lib, torch_inside

# What a message's function returns: base.FastMessage.
OVER, POSTED, NOT_BEGUN = range(3)
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


if TYPE_CHECKING:

    class FastCollective(Protocol):
        """Of one rank of one group."""

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


class _ByCtypes:
    """An operation under way in the core, as Python holds it. ``address``: of the core's ticket, which is released with
    this; ``status``: of native, PENDING until `done` or `settle` has seen the end."""

    address: Any = None
    status = PENDING
    _handle: Any = None

    def hold(self, handle: Any, at: Any, /) -> None:
        """Takes over the ticket whose address is ``at[0]``, and puts None there. ``handle``: its group's, which is to
        outlive it."""
        self._handle, self.address = handle, at[0]
        at[0] = None  # no signal handler runs between these two lines

    def done(self) -> bool:
        if self.status == PENDING:
            self.status = lib.c10d_test(self.address)
        return self.status != PENDING

    def settle(self, nanoseconds: int, may_run: bool, /) -> bool:
        """`done`, after a wait of up to so long, as c10d_settle."""
        if self.status == PENDING:
            self.status = lib.c10d_settle(self._handle, self.address, nanoseconds, may_run)
        return self.status != PENDING

    def __del__(self) -> None:
        if self.address:
            lib.c10d_release(self.address)


def _set_up() -> Any:
    """The extension, told what it needs of torch and of the core. ImportError where it cannot be had."""
    from . import _fast

    if not torch_inside.in_c:
        raise ImportError("this torch does not show C what its tensors are")
    try:
        exchange = torch.Tensor.__dlpack_c_exchange_api__
    except AttributeError as error:
        raise ImportError("this torch does not show C its tensors") from error
    known = [(*_DLPACK[dtype.name], dtype.code) for dtype in BY_DTYPE.values() if dtype.name in _DLPACK]
    try:
        _fast.set_up(exchange, bytes(n for each in known for n in each))
    except ValueError as error:
        raise ImportError("this torch shows C its tensors in another way") from error
    of_code = {code: (PACKED[code] >> 16, REDUCES[code]) for code in PACKED}
    shapes = [SHAPES[Op(number)] for number in range(len(SHAPES))]
    packed = [
        s.reads | s.writes << 2 | s.from_each << 4 | s.to_each << 5 | s.reduces << 6 | s.counted << 7 for s in shapes
    ]
    kinds = bytes(n for code in range(max(of_code) + 1) for n in of_code.get(code, (0, 0)))
    _fast.set_up_kinds(kinds, bytes(packed))
    _fast.set_up_tickets(address_of(lib.c10d_test), address_of(lib.c10d_settle), address_of(lib.c10d_release))
    return _fast


try:
    _extension = _set_up()
except ImportError:
    _extension = None


if TYPE_CHECKING:
    CoreTicket = _ByCtypes
else:
    CoreTicket = _ByCtypes if _extension is None else _extension.CoreTicket


def collective(function: Any, handle: int, rank: int, size: int, submit: Any = None) -> FastCollective | None:
    """``function``: c10d_fast_collective, or another of native.lib that takes and returns the same; ``handle``: its
    first argument; ``submit``: c10d_fast_submit, or None."""
    if _extension is None:
        return None
    made: FastCollective = _extension.FastCollective(address_of(function), handle, rank, size, address_of(submit))
    return made


def message(handle: Any, ranks: int) -> Callable[..., int] | None:
    """A function that posts a message of the only one of its tensors and waits a while for its end, as
    base.FastMessage. OVER; or POSTED, and the ticket's address is in the list ``posted``, unless the group is closed;
    or NOT_BEGUN, as it is no plain CPU tensor with elements, or no such peer, or somebody watches torch's
    dispatcher."""
    if _extension is None:
        return None
    return partial(_extension.message, address_of(lib.c10d_message), handle, ranks)
