"""What a message between hosts is made of: its header, the tags it goes by, its ticket; and what waits for its match:
receives that have found no message (Wanted), messages that came before their receive (EarlyMessages).

Tags beyond those of MPI (MPICH's end at 2^29) share one tag, and their messages are told apart by their headers; what
comes before its receive is taken in and kept: headers, and short messages as far as there is room (room.py)."""

from __future__ import annotations

import itertools
import math
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ... import native
from ..tickets import PyTicket
from ..trouble import Trouble
from .link import LARGE_TAGS, POINT_TO_POINT, Buffer

if TYPE_CHECKING:
    from mpi4py.MPI import Message as Found
    from mpi4py.MPI import Request, Status

    from ...call import Message
    from .. import Ticket
    from .link import MpiLink


HEADER = struct.Struct("<QIIqQQ24x")
SHARED_TAGS = LARGE_TAGS, LARGE_TAGS + 1
AFTERWARDS, WHOLE, TO_ASK_FOR = range(3)


class MessageHeader(NamedTuple):
    """What is in HEADER. ``way``: of the bytes: they come after it (WHOLE: in one message with it), or wait until they
    are asked for (TO_ASK_FOR: room.py); ``number``: the message's, on its sender; ``token``: of the group
    (link.py)."""

    nbytes: int
    dtype: int
    way: int
    tag: int
    number: int
    token: int


class MessageTicket(PyTicket):
    """``number``: of the message, on its sender; ``complete``: see PyTicket. What moves it: messages.py."""

    def __init__(self, message: Message, number: int, complete: Callable[[int], None]) -> None:
        super().__init__(complete)
        self.message, self.number = message, number
        self.began = time.monotonic()
        self.since: float | None = None  # when it was first waited for: its time-out runs from then
        self.deadline = math.inf
        self.requests: list[Request] = []
        self.keep: Buffer | None = None  # a send: what MPI reads besides the tensor; what was asked for: where it comes
        self.asked: list[Request] | None = None  # a receive: of data that it has asked for
        self.counted = False  # among those under way with its peer
        self.posted = False  # a send: MPI has all of it
        self.refused: Trouble | None = None  # a send: by its receiver
        self.kept_until = 0.0  # of one that was left: until then it may complete in a group that has ended
        self.matched = False
        self.inner: Ticket | None = None  # the local ticket that a receive from any source has become

    def begun(self) -> bool:
        """Whether anything of it is known to MPI or to another transport."""
        return bool(self.requests) or self.inner is not None or self.asked is not None


def tags_of(tag: int, limit: int) -> tuple[int, int]:
    """MPI's tags, up to ``limit``, of the headers and the data of messages with that tag; negative ones are torch's
    own."""
    at = POINT_TO_POINT + (4 * tag if tag >= 0 else 4 * (-1 - tag) + 2)
    return (at, at + 1) if at + 1 <= limit else SHARED_TAGS


def receive_header(link: MpiLink, found: Found, status: Status) -> tuple[MessageHeader, Buffer]:
    """The header of the message that a matched probe has found, and the memory that it is in."""
    memory = Buffer(max(HEADER.size, status.Get_count(link.MPI.BYTE)))
    found.Recv([memory.memory, link.MPI.BYTE])
    return MessageHeader._make(HEADER.unpack_from(memory.memory)), memory


def unlike(ticket: MessageTicket, header: MessageHeader) -> Trouble | None:
    """The Trouble of a message whose header says that it is not what its receive is for; else None."""
    message = ticket.message
    if header.nbytes == message.tensor.nbytes and header.dtype == message.dtype.code:
        return None
    return Trouble(
        native.MISMATCH,
        ticket._source,
        expected=message.tensor.nbytes,
        actual=header.nbytes,
        expected_dtype=message.dtype.code,
        actual_dtype=header.dtype,
    )


def late_news(ticket: MessageTicket, check: Callable[[Sequence[int]], None]) -> Trouble | None:
    """What is still wrong with a message whose bytes have moved. A send may have been refused by its receiver. A
    receive fails if its sender was interrupted meanwhile: that one has its tensor back, may have changed it, and has
    said before that the group is of no more use. ``check``: see Messages."""
    if ticket.refused is not None:
        return ticket.refused
    if ticket.message.is_recv:
        try:
            check([])
        except Trouble as trouble:
            if trouble.status == native.BROKEN and trouble.cause in native.ENDED_HERE and trouble.by == ticket._source:
                return trouble
    return None


class Wanted:
    """By peer and tag, in order of posting. Any number of one kind takes no longer to look through than one."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], OrderedDict[MessageTicket, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def __contains__(self, ticket: MessageTicket) -> bool:
        return ticket in self._kinds.get(_kind(ticket), ())

    def add(self, ticket: MessageTicket) -> None:
        self._kinds.setdefault(_kind(ticket), OrderedDict())[ticket] = None

    def remove(self, ticket: MessageTicket) -> None:
        """Takes a receive out, if it is here."""
        kind = self._kinds.get(_kind(ticket))
        if kind is not None:
            kind.pop(ticket, None)
            if not kind:
                self._kinds.pop(_kind(ticket), None)

    def first(self, kind: tuple[int, int]) -> MessageTicket | None:
        """Returns the oldest receive of a kind, or None."""
        return next(iter(self._kinds.get(kind, ())), None)

    def kinds(self) -> list[tuple[int, int]]:
        """(peer, tag) of those that are here; the one with the oldest receive first."""
        oldest = {kind: ticket.number for kind in list(self._kinds) if (ticket := self.first(kind)) is not None}
        return sorted(oldest, key=oldest.__getitem__)

    def tickets(self) -> list[MessageTicket]:
        return [ticket for tickets in list(self._kinds.values()) for ticket in list(tickets)]


def _kind(ticket: MessageTicket) -> tuple[int, int]:
    return ticket.message.peer, ticket.message.tag


@dataclass(eq=False, slots=True)
class EarlyMessage:
    """``memory``: the header's, and the bytes' where they came with it."""

    arrival: int
    source: int
    header: MessageHeader
    memory: Buffer


class EarlyMessages:
    """The messages of one group that came before their receive."""

    def __init__(self, link: MpiLink) -> None:
        self._link = link
        self._kept: dict[tuple[int, int], deque[EarlyMessage]] = {}  # by source and tag, as they came
        self._arrivals = itertools.count()

    def has_come(self) -> bool:
        """Returns whether there is a message to take in."""
        return self._link.comm.Iprobe(self._link.MPI.ANY_SOURCE, SHARED_TAGS[0])

    def take_in(self) -> None:
        """Receives the next, if it is still there, and keeps it."""
        link, status = self._link, self._link.MPI.Status()
        if (found := link.comm.Improbe(link.MPI.ANY_SOURCE, SHARED_TAGS[0], status)) is not None:
            header, memory = receive_header(link, found, status)
            if header.token == link.token:
                early = EarlyMessage(next(self._arrivals), status.Get_source(), header, memory)
                self._kept.setdefault((early.source, header.tag), deque()).append(early)

    def take(self, tag: int, peer: int, may: Callable[[int], bool]) -> EarlyMessage | None:
        """The oldest with that tag from ``peer`` (-1: from any rank), which is not kept any longer. ``may``: whether it
        may be from that rank."""
        kinds = [k for k in list(self._kept) if k[1] == tag] if peer < 0 else [(peer, tag)]
        found = [kept for kind in kinds if (kept := self._kept.get(kind)) and may(kind[0])]
        if not found:
            return None
        kept = min(found, key=lambda kept: kept[0].arrival)
        early = kept.popleft()
        if not kept:
            self._kept.pop((early.source, tag), None)
        return early

    def close(self) -> None:
        self._kept.clear()
