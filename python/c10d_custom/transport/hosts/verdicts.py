"""What the receiver of a long message between hosts says to its sender: whether its receive fits it.

A verdict is sent as the receive is matched, on a tag of its own, and arrives while the data move. A send is over once
it has one: MPI may be through with its bytes long before. It names the message by its number, since a send that timed
out, or was left, may be answered as well.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .link import VERDICT, Buffer

if TYPE_CHECKING:
    from ...call import Message
    from .link import Asides, MpiLink
    from .message_ticket import MessageTicket


_VERDICT = struct.Struct("<QQI12x")  # number of the message; bytes and dtype of the receive


def answer(link: MpiLink, asides: Asides, receive: Message, source: int, number: int) -> None:
    """Tells ``source`` what its message of that number is received as."""
    verdict = Buffer(_VERDICT.size)
    _VERDICT.pack_into(verdict.memory, 0, number, receive.tensor.nbytes, receive.dtype.code)
    requests = asides.begin(verdict)
    requests.extend(map(link.comm.Isend, ([verdict.memory, link.MPI.BYTE],), (source,), (VERDICT,)))


def hear(link: MpiLink, send: MessageTicket, under_way: Iterable[MessageTicket]) -> bool:
    """Takes in what the receiver of ``send``, whose bytes MPI has moved, says of the sends ``under_way``. True: it has
    said it of this one."""
    send.sent, peer = True, send.message.peer
    while send.verdict is None and (found := link.comm.Improbe(peer, VERDICT)) is not None:
        verdict = Buffer(_VERDICT.size)
        found.Recv([verdict.memory, link.MPI.BYTE])
        number, nbytes, dtype = _VERDICT.unpack(verdict.memory)
        for ticket in under_way:
            if ticket.number == number and ticket.message.peer == peer and not ticket.message.is_recv:
                ticket.verdict = nbytes, dtype
    return send.verdict is not None
