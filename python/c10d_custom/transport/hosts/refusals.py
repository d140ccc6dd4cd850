"""What the sender of a long message between hosts is told whose receive does not fit it.

Only a refusal is sent back: nothing waits for it, and a message that fits costs nothing. It says all that its sender
needs for the error, and names the message by its number, so that a rank remembers nothing of what it has sent. It
leaves before the receiver takes in the data: a send of which MPI has to wait for the receiver (MPICH's, of more than it
buffers) ends with the error. One that was over sooner is told of by one of the next calls of its rank.

A rank that sends long messages has one receive for refusals under way, from any rank; further ones wait in MPI.
"""

from __future__ import annotations

import contextlib
import struct
import time
from typing import TYPE_CHECKING

from ... import dtypes, native
from ...call import Message, Region
from ..failure import Trouble
from .link import REFUSAL, Buffer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi4py.MPI import Request

    from .asides import Asides
    from .link import MpiLink
    from .message_ticket import Head, MessageTicket


# HERE; dtypes sent and received; who refuses; the group's token; number of the message; bytes sent and received; tag
_REFUSAL = struct.Struct("<IIIiQQQQq8x")
_EVERY = 1e-3  # s between two looks of calls
_HERE = 1  # in a buffer that a refusal has come into


class Refusals:
    """Of one group. Its methods are called by one thread at a time, and by signal handlers amid them."""

    def __init__(self, link: MpiLink) -> None:
        self._link = link
        self._inbox = Buffer(_REFUSAL.size)
        self._receive: list[Request] = []
        self._hearing = False
        self._looked = 0.0
        self.late: list[tuple[Trouble, Message]] = []  # of sends that were over: what `take` gives

    # --- the receiver's side

    def refuse(self, asides: Asides, head: Head, receive: MessageTicket) -> None:
        """Tells the sender of a message with that head that ``receive``, which has met it, is for another."""
        m, refusal, link = receive.message, Buffer(_REFUSAL.size), self._link
        what = link.token, head.number, head.nbytes, m.tensor.nbytes, head.tag
        _REFUSAL.pack_into(refusal.memory, 0, _HERE, head.dtype, m.dtype.code, link.rank, *what)
        asides.send(refusal, receive._source, REFUSAL)

    # --- the sender's

    def expect(self) -> None:
        """This rank is about to send what may be refused."""
        if not self._receive:
            self._inbox.memory[0] = 0
            box, link = [self._inbox.memory, self._link.MPI.BYTE], self._link
            self._receive.extend(map(link.comm.Irecv, (box,), (link.MPI.ANY_SOURCE,), (REFUSAL,)))

    def hear(self, sends: Iterable[MessageTicket]) -> None:
        """Takes in what has come. A refusal of one of ``sends``, those under way, becomes its `refused`."""
        if not self._inbox.memory[0] or self._hearing:
            return
        try:
            self._hearing = True
            while self._receive and self._receive[0].Test():
                self._note(sends)
                self._receive.clear()
                self.expect()
        finally:
            self._hearing = False

    def _note(self, sends: Iterable[MessageTicket]) -> None:
        _, sent, received, peer, token, number, nbytes, room, tag = _REFUSAL.unpack(self._inbox.memory)
        if token != self._link.token:  # it was for a group that is gone, whose communicator this one has
            return
        trouble = Trouble(native.MISMATCH, peer, call=number, expected=nbytes, actual=room)
        trouble.expected_dtype, trouble.actual_dtype = sent, received
        for ticket in sends:
            if ticket.number == number and not ticket.message.is_recv:
                ticket.refused = trouble
                return
        trouble.over = True
        message = Message("send", Region(0, nbytes, 0), dtypes.BY_CODE[sent], peer, tag, 0.0, is_recv=False)
        self.late.append((trouble, message))

    def any(self) -> bool:
        """Whether there is something to `hear`, or to `take`. Lets MPI move what is about to come, as sends that are
        over at once do not; now and then, since that costs microseconds."""
        if self._receive and not self._inbox.memory[0] and (now := time.monotonic()) - self._looked > _EVERY:
            self._looked = now
            with contextlib.suppress(self._link.MPI.Exception):  # whoever moves messages sees to it
                self._link.comm.Iprobe(self._link.rank, REFUSAL)
        return bool(self.late) or self._inbox.memory[0] != 0

    def take(self) -> list[tuple[Trouble, Message]]:
        """Of sends that were over when they were refused, each once: (its Trouble, the message)."""
        late, self.late = self.late, []
        return late

    def close(self) -> None:
        self._link.withdraw(self._receive, self._inbox)
