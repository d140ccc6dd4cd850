"""What a transport remembers of its calls, as records of the trace."""

import time
from collections import deque
from ctypes import byref
from time import monotonic_ns

from .. import dtypes, native
from ..call import ANY_COUNT, Fingerprint, Op
from ..native import lib
from .trace_file import STATES, Peer, Record

_REDUCING = Op.all_reduce, Op.reduce, Op.reduce_scatter
_SEEN = {0: "absent", native.JOINED: "joined", native.LEFT: "left"}


def _dtype(code):
    return dtypes.BY_CODE[code].name if code in dtypes.BY_CODE else f"dtype{code}"


def _clock():
    """What to add to CLOCK_MONOTONIC for the seconds since 1970."""
    return time.time() - time.monotonic()


def _record(r, clock):
    def at(ns):
        return ns / 1e9 + clock if ns else None

    state = STATES.get(r.status, "running" if r.began else "waiting")
    if r.op in (native.TRACE_SEND, native.TRACE_RECV):
        operation, reduce, count = "send" if r.op == native.TRACE_SEND else "recv", "-", "-"
    else:
        state = "queued" if state == "waiting" else state
        operation = Op(r.op).name if r.op in Op.__members__.values() else f"operation{r.op}"
        reduce = dtypes.REDUCE_OPS.get(r.redop, str(r.redop)) if r.op in _REDUCING else "-"
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
        at(r.issued),
        at(r.began),
        at(r.ended),
    )


def native_records(handle):
    """The Records of a native group, oldest first."""
    room = lib.c10d_trace(handle, None, 0) + 64  # a few may come meanwhile
    records = (native.TraceRecord * room)()
    found = min(lib.c10d_trace(handle, records, room), room)
    clock = _clock()
    return sorted((_record(r, clock) for r in records[:found]), key=lambda r: r.issued)


def published(state):
    """The Fingerprint in a native PeerState; None if it has none for the sequence asked for."""
    p = state.fingerprint
    if not p.seq:
        return None
    return Fingerprint(p.seq, p.op, p.redop, p.dtype, p.root, p.count, p.device)


def native_peers(handle, size):
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

    def __init__(self, calls):
        self._collectives, self._messages = deque(maxlen=calls), deque(maxlen=calls)
        self._current = []
        self._moving = {}  # tickets of messages under way

    def begin(self, number, op, redop, dtype, root, count, in_bytes, out_bytes):
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

    def end(self, status):
        current = self._current
        if not current[11]:
            current[11] = monotonic_ns()
            current[12] = status

    def post(self, ticket):
        self._moving[ticket] = None

    def finish(self, ticket, status):
        self._moving.pop(ticket, None)
        self._messages.append(self._message(ticket, monotonic_ns(), status))

    def hand_over(self, ticket):
        """Another transport has it now."""
        self._moving.pop(ticket, None)

    @staticmethod
    def _message(ticket, ended, status):
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

    def records(self, queued, others=()):
        """``queued``: (number, Call) of collectives that have not begun; ``others``: TraceRecords of collectives that
        somebody else remembers."""
        now, clock = monotonic_ns(), _clock()
        known = sorted(
            [native.TraceRecord(*row) for row in list(self._collectives)] + list(others), key=lambda r: r.number
        )
        known = known[max(0, len(known) - self._collectives.maxlen) :]
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
