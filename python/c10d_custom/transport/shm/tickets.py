"""Operations under way in the native core."""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING, Any, ClassVar

from ... import native
from ...call import Call, Op
from ...native import Failure, lib
from ...native.fast import CoreTicket
from ..base import Ticket, is_out_of_reach

if TYPE_CHECKING:
    from ...call import Message


_LONG, _FOREVER = 1e9, 2**63 - 1  # s, ns
_ENDS = 0.1  # s: how long to wait at a time for what an abort ends


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9) if seconds < _LONG else _FOREVER


class ShmTicket(CoreTicket, Ticket):
    """Takes over the native ticket whose address is ``at[0]``. ``transport``: the ShmTransport that it is of."""

    _failure: Failure | None = None

    def __init__(self, transport: Any, at: Any, call: Any) -> None:
        self._transport, self._call = transport, call
        self.hold(transport._handle, at)

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        done = self.settle(nanoseconds(seconds), may_run)
        if may_run and self._transport.raised is not None and self._transport.has_raised():
            raise self._transport._interruption()
        return done

    def error(self) -> BaseException | None:
        if not self.done() or self.status == native.OK:
            return None
        if self._failure is None:
            self._failure = Failure()
            lib.c10d_wait(self._transport._handle, self.address, 0, False, byref(self._failure))
        return self._transport.error(self._failure, self._said())

    def want(self) -> None:
        if not self.collective:
            self.settle(0, False)

    def withdraw(self) -> None:
        transport = self._transport
        if self.collective:
            transport.interrupt()  # then the thread that runs it, or was to, ends it
            while not self.wait(_ENDS, may_run=True):
                pass
        else:
            lib.c10d_withdraw(transport._handle, self.address)

    @property
    def collective(self) -> bool:
        return isinstance(self._call, Call)

    def standing(self) -> tuple[str, str]:
        number = lib.c10d_ticket_number(self.address)
        failure = Failure(status=native.TIMEOUT, peer=-1, by=-1, call=number, seq=number)
        try:
            from .error_text import ShmErrorText  # when it is wanted

            return ShmErrorText(self._transport, failure, self._said(), self._transport.states(number)).standing()
        except Exception as problem:
            if not is_out_of_reach(problem):
                raise
            return f"{self._said().name} #{number}", ""

    def _said(self) -> Call | Message:
        return self._call

    def watch(self, token: int) -> bool:
        return lib.c10d_watch(self._transport._handle, self.address, token) == native.PENDING

    @property
    def source(self) -> int:
        return lib.c10d_ticket_source(self.address)


class CollectiveTicket(ShmTicket):
    """Of a collective that went the fast path: what errors say of it is made when there is one."""

    collective = True

    def _said(self) -> Any:
        return Named(*self._call)


class Named:
    """What errors say of a collective. ``single``: it has one tensor where others have a list."""

    __slots__ = ("_op", "_single")
    _SINGLE: ClassVar = {
        Op.all_gather: "all_gather_into_tensor",
        Op.reduce_scatter: "reduce_scatter_tensor",
        Op.all_to_all: "all_to_all_single",
    }

    def __init__(self, op: int, single: bool) -> None:
        self._op, self._single = op, single

    @property
    def name(self) -> str:
        op = Op(self._op)
        return self._SINGLE.get(op, op.name) if self._single else op.name


class MessageTicket(ShmTicket):
    """Of a message that went the fast path: what errors say of it is made when there is one."""

    def _said(self) -> Message:
        make, *arguments = self._call
        return make(*arguments)
