"""What a transport remembers of its calls, and sees of its peers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from ctypes import byref
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import dtypes, native
from ..call import ANY_COUNT, REDUCING, Op
from ..native import lib

if TYPE_CHECKING:
    from ..call import Call
    from ..dtypes import DType

# States of a call: by the codes of the native core's Status once it has ended, and before.
_STATES = {
    native.OK: "done",
    native.TIMEOUT: "timed_out",
    native.PEER_LOST: "peer_lost",
    native.MISMATCH: "mismatch",
    native.ABORTED: "aborted",
    native.USAGE: "refused",
    native.BROKEN: "broken",
    native.INTERRUPTED: "interrupted",
    native.FORKED: "forked",
    native.EXHAUSTED: "no_memory",
    native.REENTERED: "reentered",
}
UNDER_WAY = "queued", "waiting", "running"
_SEEN = {0: "absent", native.JOINED: "joined", native.LEFT: "left"}


def _dtype(code: int) -> str:
    return dtypes.BY_CODE[code].name if code in dtypes.BY_CODE else f"dtype{code}"


def _in_words(operation: str, reduce: str, dtype: str, count: str, root: int) -> str:
    """What a collective was asked for. ``reduce``: "-" where it does not reduce."""
    text = [operation] + [reduce] * (reduce != "-")
    if not operation.startswith(("barrier", "monitored_barrier")):
        text.append(f"{dtype}[{count}]")
    return " ".join(text + [f"root {root}"] * (root >= 0))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a rank announced: the fields in which ranks may not differ."""

    seq: int
    op: int
    redop: int
    dtype: int
    root: int
    count: int
    device: int  # 0: the CPU; else 1 + the ordinal of the rank's device in the group

    def __str__(self) -> str:
        op = Op(self.op) if self.op in Op.__members__.values() else None
        if op is Op.rejected:
            return f"a call whose arguments were refused (#{self.seq})"
        text = _in_words(
            f"{op.name if op is not None else f'operation {self.op}'} #{self.seq}",
            dtypes.REDUCE_OPS.get(self.redop, f"reduce op {self.redop}") if op in REDUCING else "-",
            _dtype(self.dtype),
            "uneven" if self.count == ANY_COUNT else str(self.count),
            self.root,
        )
        if self.device:
            text += " on CUDA" if self.device == 1 else f" on CUDA (its GPU {self.device - 1} in this group)"
        return text

    def differing_fields(self, other: Fingerprint) -> list[str]:
        """The names of the fields in which the two differ, but for the sequence number."""
        names = ("op", "redop", "dtype", "count", "root", "device")
        return [n for n in names if getattr(self, n) != getattr(other, n)]


class Frame(NamedTuple):
    """A place in the user's program."""

    filename: str
    line: int
    name: str


@dataclass(slots=True)
class Record:
    """One call. ``number``: of collectives, the same on all ranks; of messages, this rank's own. ``peer``: the root; of
    messages the other rank, -1 for any. Times are seconds since 1970. ``began``: a collective left the queue; both
    sides of a long message were in. ``frames``: from where it was called, innermost first, where that is known."""

    operation: str
    number: int
    reduce: str
    dtype: str
    count: str
    in_bytes: int
    out_bytes: int
    peer: int
    tag: int
    state: str
    issued: float
    began: float | None
    ended: float | None
    frames: Sequence[Frame] = ()

    @property
    def is_message(self) -> bool:
        return self.operation in ("send", "recv")

    def asked(self) -> str:
        """What was asked for, without the number."""
        if not self.is_message:
            return _in_words(self.operation, self.reduce, self.dtype, self.count, self.peer)
        peer = "any rank" if self.peer < 0 else f"rank {self.peer}"
        way = f"to {peer}" if self.operation == "send" else f"from {peer}"
        return f"{self.operation} of {self.in_bytes or self.out_bytes} bytes of {self.dtype} {way}, tag {self.tag}"


@dataclass(slots=True)
class Peer:
    """A rank as another one sees it. ``entered``: the number of the last collective it announced, None if not known."""

    rank: int
    pid: int
    state: str
    entered: int | None = None
    calling: str = "-"


def _clock() -> float:
    """What to add to CLOCK_MONOTONIC for the seconds since 1970."""
    return time.time() - time.monotonic()


def _record(r: native.TraceRecord, clock: float) -> Record:
    began, ended = (ns / 1e9 + clock if ns else None for ns in (r.began, r.ended))
    state = _STATES.get(r.status, "waiting" if began is None else "running")
    if r.op in (native.TRACE_SEND, native.TRACE_RECV):
        operation, reduce, count = "send" if r.op == native.TRACE_SEND else "recv", "-", "-"
    else:
        state = "queued" if state == "waiting" else state
        operation = Op(r.op).name if r.op in Op.__members__.values() else f"operation{r.op}"
        reduce = dtypes.REDUCE_OPS.get(r.redop, str(r.redop)) if r.op in REDUCING else "-"
        count = "uneven" if r.count == ANY_COUNT else str(r.count)
    what = operation, r.number, reduce, _dtype(r.dtype), count
    return Record(*what, r.in_bytes, r.out_bytes, r.peer, r.tag, state, r.issued / 1e9 + clock, began, ended)


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
    return Fingerprint(p.seq, p.op, p.redop, p.dtype, p.root, p.count, p.device) if p.seq else None


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
    """The last calls of a transport that is written in Python, each a list of TraceRecord's fields. Collectives come
    one at a time. What is read is copied first, so that any thread and any signal handler may read."""

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
        call = [number, op, redop, dtype.code, root, count, in_bytes, out_bytes, 0, now, now, 0, native.PENDING]
        self._current = call
        self._collectives.append(call)
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
        m, size, issued = ticket.message, ticket.message.tensor.nbytes, int(ticket.began * 1e9)
        peer = ticket.source if m.is_recv and ticket.source >= 0 else m.peer
        op, moved = (native.TRACE_RECV, (0, size)) if m.is_recv else (native.TRACE_SEND, (size, 0))
        began = issued if ticket.matched else 0
        return [ticket.number, op, 0, m.dtype.code, peer, 0, *moved, m.tag, issued, began, ended, status]

    @staticmethod
    def _queued(number: int, c: Call, now: int) -> list[int]:
        moved = (sum(t.nbytes for t in tensors) for tensors in (c.inputs, c.outputs))
        return [number, c.op, c.redop, c.dtype.code, c.root, c.count, *moved, 0, now, 0, 0, native.PENDING]

    def records(self, queued: Iterable[tuple[int, Call]], others: Iterable[native.TraceRecord] = ()) -> list[Record]:
        """``queued``: (number, Call) of collectives that have not begun; ``others``: TraceRecords of collectives that
        somebody else remembers."""
        now, clock = monotonic_ns(), _clock()
        known = [native.TraceRecord(*row) for row in list(self._collectives)] + list(others)
        known = sorted(known, key=lambda r: r.number)[max(0, len(known) - self._calls) :]
        rows = [self._queued(number, call, now) for number, call in queued] + list(self._messages)
        rows += [self._message(t, 0, native.PENDING) for t in list(self._moving)]
        return [_record(r, clock) for r in known + [native.TraceRecord(*row) for row in rows]]
