"""A message between hosts: its ticket, its head, and the tags it goes by."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ... import native
from ..tickets import PyTicket
from ..trouble import Trouble
from .link import LARGE_TAGS, POINT_TO_POINT, Buffer

if TYPE_CHECKING:
    from itertools import count

    from mpi4py.MPI import Message as Found
    from mpi4py.MPI import Request, Status

    from ...call import Message
    from ..base import Ticket
    from .link import MpiLink


HEAD = struct.Struct("<QIIqQQ24x")
SHARED_TAGS = LARGE_TAGS, LARGE_TAGS + 1
AFTERWARDS, WHOLE, TO_ASK_FOR = range(3)


class Head(NamedTuple):
    """What is in HEAD. ``way``: of the bytes: they come after the head (WHOLE: in one message with it), or wait until
    they are asked for (TO_ASK_FOR: room.py); ``number``: the message's, on its sender; ``token``: of the group
    (link.py)."""

    nbytes: int
    dtype: int
    way: int
    tag: int
    number: int
    token: int


class Engine(Protocol):
    """What a ticket asks of the Messages that it belongs to."""

    link: MpiLink
    numbers: count[int]
    complete: Callable[[int], None]

    def refuse_inside(self, name: str) -> None: ...

    def progress(self) -> bool: ...

    def serve_this_host(self) -> None: ...

    def want(self, ticket: MessageTicket) -> None: ...

    def look_soon(self) -> None: ...

    def withdraw(self, ticket: MessageTicket) -> None: ...

    def refused_late(self) -> bool: ...

    def refusal(self, message: Message) -> BaseException | None: ...


class MessageTicket(PyTicket):
    def __init__(self, engine: Engine, message: Message) -> None:
        super().__init__(engine.complete)
        self.engine, self.message = engine, message
        self.began = time.monotonic()
        self.since: float | None = None  # when it was first waited for: its time-out runs from then
        self.deadline = math.inf
        self.number = next(engine.numbers)
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

    def want(self) -> None:
        if self.since is None:
            self.engine.want(self)

    def withdraw(self) -> None:
        self.engine.withdraw(self)

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        begun, waited = time.monotonic(), 0.0
        self.want()
        while not self._done:
            self.engine.refuse_inside(self.message.name)
            if begun + waited >= self.deadline:
                self.engine.look_soon()
            self.engine.progress()
            waited = time.monotonic() - begun
            if self._done or waited >= seconds:
                break
            if self.engine.refused_late() and self.message.is_recv and not self.begun():
                # What it waits for may be the answer of who has refused.
                if (error := self.engine.refusal(self.message)) is not None:
                    raise error
            self.engine.serve_this_host()
            self.engine.link.pause(waited)
        return self._done


def tags_of(tag: int, limit: int) -> tuple[int, int]:
    """MPI's tags, up to ``limit``, of the heads and the data of messages with that tag; negative ones are torch's
    own."""
    at = POINT_TO_POINT + (4 * tag if tag >= 0 else 4 * (-1 - tag) + 2)
    return (at, at + 1) if at + 1 <= limit else SHARED_TAGS


def receive_head(link: MpiLink, found: Found, status: Status) -> tuple[Head, Buffer]:
    """The head of the message that a matched probe has found, and the memory that it is in."""
    memory = Buffer(max(HEAD.size, status.Get_count(link.MPI.BYTE)))
    found.Recv([memory.memory, link.MPI.BYTE])
    return Head._make(HEAD.unpack_from(memory.memory)), memory


def unlike(ticket: MessageTicket, head: Head) -> Trouble | None:
    """The Trouble of a message whose head says that it is not what its receive is for; else None."""
    message = ticket.message
    if head.nbytes == message.tensor.nbytes and head.dtype == message.dtype.code:
        return None
    return Trouble(
        native.MISMATCH,
        ticket._source,
        expected=message.tensor.nbytes,
        actual=head.nbytes,
        expected_dtype=message.dtype.code,
        actual_dtype=head.dtype,
    )


def late_news(ticket: MessageTicket, check: Callable[[Sequence[int]], None]) -> Trouble | None:
    """Of one whose bytes have moved. A send may have been refused. And who was interrupted while it sent has its tensor
    back, and has said before that the group is of no more use: the bytes that are here may not be those that were sent.
    ``check``: see Messages."""
    if ticket.refused is not None:
        return ticket.refused
    if ticket.message.is_recv:
        try:
            check([])
        except Trouble as trouble:
            if trouble.status == native.BROKEN and trouble.cause in native.ENDED_HERE and trouble.by == ticket._source:
                return trouble
    return None
