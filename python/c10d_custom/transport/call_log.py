"""What a transport remembers of its calls, as records of the trace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from ctypes import byref
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from .. import dtypes, native
from ..call import ANY_COUNT, REDUCING, Op
from ..native import lib
from .fingerprint import Fingerprint
from .trace_file import STATES, Peer, Record

if TYPE_CHECKING:
    from ..call import Call
    from ..dtypes import DType


_SEEN = {0: "absent", native.JOINED: "joined", native.LEFT: "left"}


def _dtype(code: int) -> str:
    return dtypes.BY_CODE[code].name if code in dtypes.BY_CODE else f"dtype{code}"


def _clock() -> float:
    """What to add to CLOCK_MONOTONIC for the seconds since 1970."""
    return time.time() - time.monotonic()


def _record(r: native.TraceRecord, clock: float) -> Record:
    def at(ns: int) -> float | None:
        return ns / 1e9 + clock if ns else None

    state = STATES.get(r.status, "running" if r.began else "waiting")
    if r.op in (native.TRACE_SEND, native.TRACE_RECV):
        operation, reduce, count = "send" if r.op == native.TRACE_SEND else "recv", "-", "-"
    else:
        state = "queued" if state == "waiting" else state
        operation = Op(r.op).name if r.op in Op.__members__.values() else f"operation{r.op}"
        reduce = dtypes.REDUCE_OPS.get(r.redop, str(r.redop)) if r.op in REDUCING else "-"
        count = "uneven" if r.count == ANY_COUNT else str(r.count)
    return Record(
        operation,
        r.number,
        reduce,
        _dtype(r.dtype),
        count,
        r.in_bytes,
        r.out_bytes,
        r.peer,
        r.tag,
        state,
        r.issued / 1e9 + clock,
        at(r.began),
        at(r.ended),
    )


def native_records(handle: int) -> list[Record]:
    """The Records of a native group, oldest first."""
    room = lib.c10d_trace(handle, None, 0) + 64  # a few may come meanwhile
    records = (native.TraceRecord * room)()
    found = min(lib.c10d_trace(handle, records, room), room)
    clock = _clock()
    return sorted((_record(r, clock) for r in records[:found]), key=lambda r: r.issued)


def published(state: native.PeerState) -> Fingerprint | None:
    """The Fingerprint in a native PeerState; None if it has none for the sequence asked for."""
    p = state.fingerprint
    if not p.seq:
        return None
    return Fingerprint(p.seq, p.op, p.redop, p.dtype, p.root, p.count, p.device)


def native_peers(handle: int, size: int) -> list[Peer]:
    """The Peers of a native group."""
    seen = []
    for rank in range(size):
        state = native.PeerState()
        lib.c10d_peer_state(handle, rank, 0, byref(state))
        lib.c10d_peer_state(handle, rank, state.arrived, byref(state))
        how = _SEEN.get(state.state, "-")
        if how == "joined":
            how = "gone" if not state.alive else "stopped" if lib.c10d_peer_stopped(handle, rank) else how
        seen.append(Peer(rank, state.pid, how, state.arrived, str(published(state) or "-")))
    return seen


class CallLog:
    """The last calls of a transport that is written in Python. Collectives come one at a time. What is read is copied
    first, so that any thread and any signal handler may read."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._collectives: deque[list[int]] = deque(maxlen=calls)
        self._messages: deque[list[int]] = deque(maxlen=calls)
        self._current: list[int] = []
        self._moving: dict[Any, None] = {}  # tickets of messages under way

    def begin(
        self, number: int, op: Op, redop: int, dtype: DType, root: int, count: int, in_bytes: int, out_bytes: int
    ) -> int:
        """Returns monotonic_ns(), the time of its begin."""
        now = monotonic_ns()
        self._current = [
            number,
            op,
            redop,
            dtype.code,
            root,
            count,
            in_bytes,
            out_bytes,
            0,
            now,
            now,
            0,
            native.PENDING,
        ]
        self._collectives.append(self._current)
        return now

    def end(self, status: int) -> None:
        current = self._current
        if not current[11]:
            current[11] = monotonic_ns()
            current[12] = status

    def post(self, ticket: Any) -> None:
        self._moving[ticket] = None

    def finish(self, ticket: Any, status: int) -> None:
        self._moving.pop(ticket, None)
        self._messages.append(self._message(ticket, monotonic_ns(), status))

    def hand_over(self, ticket: Any) -> None:
        """Forgets a message that another transport carries out, and remembers, from now on."""
        self._moving.pop(ticket, None)

    @staticmethod
    def _message(ticket: Any, ended: int, status: int) -> list[int]:
        m, size, began = ticket.message, ticket.message.tensor.nbytes, int(ticket.began * 1e9)
        peer = ticket.source if m.is_recv and ticket.source >= 0 else m.peer
        return [
            ticket.number,
            native.TRACE_RECV if m.is_recv else native.TRACE_SEND,
            0,
            m.dtype.code,
            peer,
            0,
            0 if m.is_recv else size,
            size if m.is_recv else 0,
            m.tag,
            began,
            began if ticket.matched else 0,
            ended,
            status,
        ]

    def records(self, queued: Iterable[tuple[int, Call]], others: Iterable[native.TraceRecord] = ()) -> list[Record]:
        """``queued``: (number, Call) of collectives that have not begun; ``others``: TraceRecords of collectives that
        somebody else remembers."""
        now, clock = monotonic_ns(), _clock()
        known = sorted(
            [native.TraceRecord(*row) for row in list(self._collectives)] + list(others), key=lambda r: r.number
        )
        known = known[max(0, len(known) - self._calls) :]
        waiting = [
            [
                number,
                call.op,
                call.redop,
                call.dtype.code,
                call.root,
                call.count,
                sum(t.nbytes for t in call.inputs),
                sum(t.nbytes for t in call.outputs),
                0,
                now,
                0,
                0,
                native.PENDING,
            ]
            for number, call in queued
        ]
        messages = list(self._messages) + [self._message(t, 0, native.PENDING) for t in list(self._moving)]
        return [_record(r, clock) for r in known + [native.TraceRecord(*row) for row in waiting + messages]]
