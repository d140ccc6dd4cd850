"""What the sender of a long message between hosts is told whose receive does not fit it.

Only a refusal is sent back: nothing waits for it, and a message that fits costs nothing. It says all that its sender
needs for the error, and names the message by its number, so that a rank remembers nothing of what it has sent. It
leaves before the receiver takes in the data: a send of which MPI has to wait for the receiver (MPICH's, of more than it
buffers) ends with the error. One that was over sooner is told of by one of the next calls of its rank."""

from __future__ import annotations

import contextlib
import struct
import time
from functools import partial
from typing import TYPE_CHECKING

from ... import dtypes, native
from ...call import Message, Region
from ..trouble import Trouble
from .link import REFUSAL, Buffer, Inbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .link import BackgroundTransfers, MpiLink
    from .message_ticket import MessageHeader, MessageTicket


# dtypes sent and received; who refuses; the group's token; number of the message; bytes sent and received; tag
_REFUSAL = struct.Struct("<IIiQQQQq")
_EVERY = 1e-3  # s between two looks


class Refusals:
    """Refusals of one group's messages. Its methods are called by one thread at a time, and by signal handlers amid
    them."""

    def __init__(self, link: MpiLink) -> None:
        self._link = link
        self._inbox = Inbox(link, REFUSAL, _REFUSAL.size)
        self._expected = self._come = False
        self._looked = 0.0
        self.met: list[MessageTicket] = []  # sends under way that were refused, for whoever ends them
        self.late: list[tuple[Trouble, Message]] = []  # of sends that were over: what `take` gives

    # --- the receiver's side

    def refuse(self, background: BackgroundTransfers, header: MessageHeader, receive: MessageTicket) -> None:
        """Tells the sender of a message with that header that ``receive``, which has met it, is for another."""
        m, refusal, link = receive.message, Buffer(_REFUSAL.size), self._link
        what = link.token, header.number, header.nbytes, m.tensor.nbytes, header.tag
        _REFUSAL.pack_into(refusal.memory, 0, header.dtype, m.dtype.code, link.rank, *what)
        background.send(refusal, receive._source, REFUSAL)

    # --- the sender's

    def expect(self) -> None:
        """Notes that this rank is about to send what may be refused."""
        self._expected = True

    def hear(self, sends: Mapping[int, MessageTicket], now: bool = False) -> None:
        """Takes in what has come. A refusal of one of ``sends``, those under way, by number, becomes its `refused`.
        ``now``: even if the last look was just before."""
        if self._expected and not self._inbox.hearing and (now or self._come or self._due()):
            self._come = False
            self._inbox.hear(partial(self._note, sends))

    def _due(self) -> bool:
        """Whether it is time for another look, which costs microseconds."""
        if (now := time.monotonic()) - self._looked < _EVERY:
            return False
        self._looked = now
        return True

    def _note(self, sends: Mapping[int, MessageTicket], word: memoryview, _: int) -> None:
        sent, received, peer, token, number, nbytes, room, tag = _REFUSAL.unpack(word)
        if token != self._link.token:  # it was for a group that is gone, whose communicator this one has
            return
        trouble = Trouble(native.MISMATCH, peer, call=number, expected=nbytes, actual=room)
        trouble.expected_dtype, trouble.actual_dtype = sent, received
        if (ticket := sends.get(number)) is not None:
            ticket.refused = trouble
            self.met.append(ticket)
            return
        trouble.over = True
        message = Message("send", Region(0, nbytes, 0), dtypes.BY_CODE[sent], peer, tag, 0.0, is_recv=False)
        self.late.append((trouble, message))

    def any(self) -> bool:
        """Whether there is something to `hear`, or to `take`: looked for now and then."""
        if self._expected and not self._come and self._due():
            with contextlib.suppress(self._link.MPI.Exception):  # whoever moves messages sees to it
                self._come = self._link.comm.Iprobe(self._link.MPI.ANY_SOURCE, REFUSAL)
        return bool(self.late) or self._come

    def take(self) -> list[tuple[Trouble, Message]]:
        """Of sends that were over when they were refused, each once: (its Trouble, the message)."""
        return [self.late.pop(0) for _ in range(len(self.late))]  # another thread may be adding one
