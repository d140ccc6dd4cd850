"""How much of short messages between hosts may be on its way to a rank that receives none of them.

MPI takes in what is sent, wanted or not. So a sender counts the bytes of short messages that it has sent to a rank, and
that rank tells it now and then how many it has received. Where the difference would exceed `ROOM`, only the header of a
message is sent; its data wait at the sender until a receive has met the header and asks for them. So do the data of a
long message with a tag that MPI does not have: its header is taken in before it is wanted (message_ticket.py).

Data that were asked for go by a tag of their own, in the order of the asking. A receive that ends before they are here
leaves a transfer behind that takes them in: they are taken for nothing else.

Methods are called by one thread at a time, and by signal handlers amid them."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..trouble import Trouble
from .link import ASKED, ROOM_WORD, Buffer, Inbox
from .message_ticket import HEADER

if TYPE_CHECKING:
    from mpi4py.MPI import Request

    from .link import BackgroundTransfers, MpiLink
    from .message_ticket import MessageHeader, MessageTicket


ROOM = 8 << 20  # bytes, of each pair of ranks; with CELLS and CELL_BYTES as they are, as much as on one host
# the group's token; the number of a message that is asked for, or 0; bytes received from the one who reads this
_WORD = struct.Struct("<QQQ")


@dataclass(eq=False, slots=True)
class _Offer:
    """Data that wait to be asked for. ``requests``: the ticket's, to which the sends of these data are added;
    ``before``: how many these were when the data were offered; ``ticket``: None once its send has ended."""

    ticket: MessageTicket | None
    address: int
    nbytes: int
    requests: list[Request]
    before: int


class Room:
    """The room of one group's messages. True while data wait to be asked for, or to be received. ``short``: bytes of a
    message that is copied rather than kept where it is, when its send ends early."""

    def __init__(self, link: MpiLink, background: BackgroundTransfers, short: int) -> None:
        self._link, self._background, self._short = link, background, short
        self._sent, self._heard = Counter[int](), Counter[int]()  # by peer: bytes to it, and those it has received
        self._received, self._told = Counter[int](), Counter[int]()  # by peer: bytes from it, and what it knows of
        self._offered: dict[int, _Offer] = {}  # by the message's number
        self._left: dict[int, object] = {}  # what keeps the data of those whose send has ended
        self.granted: list[MessageTicket] = []  # whose data are on their way, for who sees to their end
        self._inbox = Inbox(link, ROOM_WORD, _WORD.size)

    def __bool__(self) -> bool:
        return bool(self._offered or self.granted)

    # --- the sender's side

    def take(self, peer: int, nbytes: int) -> bool:
        """Takes room for a short message; False if there is not so much."""
        needed = self._sent[peer] + HEADER.size + nbytes - ROOM
        if needed > self._heard[peer]:
            self.hear()
        if needed > self._heard[peer]:
            return False
        self._sent[peer] += HEADER.size + nbytes
        return True

    def offer(self, ticket: MessageTicket) -> None:
        """The header of its message says that its data are to be asked for."""
        tensor = ticket.message.tensor
        requests = ticket.requests
        self._offered[ticket.number] = _Offer(ticket, tensor.data_ptr(), tensor.nbytes, requests, len(requests))

    def offers(self, ticket: MessageTicket) -> bool:
        """Whether nobody has asked for its data yet."""
        offer = self._offered.get(ticket.number)
        return offer is not None and offer.ticket is ticket

    def tickets(self) -> list[MessageTicket]:
        """Returns the tickets whose data wait to be asked for."""
        return [offer.ticket for offer in list(self._offered.values()) if offer.ticket is not None]

    def take_back(self, ticket: MessageTicket) -> None:
        """Drops the offer of a refused message: nobody will ask for its data."""
        self._offered.pop(ticket.number, None)

    def leave_behind(self, ticket: MessageTicket) -> None:
        """The send ends; who asks for its data gets them all the same, as of a message that is on its way."""
        offer, tensor = self._offered[ticket.number], ticket.message.tensor
        kept: Buffer | MessageTicket = ticket
        if offer.nbytes <= self._short:
            kept = Buffer(offer.nbytes)
            kept.fill(0, tensor.data_ptr(), offer.nbytes)
            offer.address = kept.address
        offer.requests, offer.before, offer.ticket = [], 0, None
        self._left[ticket.number] = kept

    def hear(self) -> None:
        """Takes in what others have said, and sends what they have asked for."""
        self._inbox.hear(self._note)

    def _note(self, word: memoryview, peer: int) -> None:
        token, number, received = _WORD.unpack(word)
        if token != self._link.token:  # it was for a group that is gone, whose communicator this one has
            return
        self._heard[peer] = max(self._heard[peer], received)
        offer = self._offered.get(number)
        if offer is None:
            return
        try:
            self._link.before_sending()
        except Trouble:
            return  # the group has ended, and the message with it
        if len(offer.requests) == offer.before:
            self._link.pieces(self._link.comm.Isend, offer.address, offer.nbytes, peer, ASKED, offer.requests)
        if offer.ticket is None:
            self._background.adopt(offer.requests, self._left.pop(number, None))
        else:
            offer.ticket.posted = True
            if offer.ticket not in self.granted:
                self.granted.append(offer.ticket)
        self._offered.pop(number, None)

    # --- the receiver's

    def received(self, source: int, nbytes: int) -> None:
        """Notes that a short message, which came whole, has gone to its receive."""
        self._received[source] += HEADER.size + nbytes
        if self._received[source] - self._told[source] >= ROOM // 4:
            self._say(source, 0)

    def ask(self, source: int, header: MessageHeader, ticket: MessageTicket) -> None:
        """Asks for the data of a message with that header, for a receive that it fits: they come to its `keep`."""
        ticket.keep = data = Buffer(header.nbytes)
        ticket.asked = requests = self._background.begin(data)
        self._link.receive(data.address, header.nbytes, source, ASKED, requests)
        self._say(source, header.number)

    def _say(self, peer: int, number: int) -> None:
        word = Buffer(_WORD.size)
        self._told[peer] = self._received[peer]
        _WORD.pack_into(word.memory, 0, self._link.token, number, self._told[peer])
        self._background.send(word, peer, ROOM_WORD)

    def close(self) -> None:
        self._offered.clear()
        self._left.clear()
