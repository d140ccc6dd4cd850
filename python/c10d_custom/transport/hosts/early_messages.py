"""Messages with tags beyond those of MPI (MPICH's end at 2^29). They share one tag, and are told apart by their heads;
what comes before its receive is taken in and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .link import Buffer
from .message_ticket import SHARED_TAGS, Head, receive_head

if TYPE_CHECKING:
    from mpi4py.MPI import Request

    from .asides import Asides
    from .link import MpiLink


@dataclass(eq=False, slots=True)
class EarlyMessage:
    """``requests``: of its data, which come into ``data``; that is ``memory``, the head's, where they came with it."""

    source: int
    head: Head
    memory: Buffer
    data: Buffer
    requests: list[Request]


class EarlyMessages:
    """Of one group. ``kept``: in the order in which they came."""

    def __init__(self, link: MpiLink, asides: Asides) -> None:
        self._link, self._asides = link, asides
        self.kept: list[EarlyMessage] = []

    def has_come(self) -> bool:
        """Whether there is one to take in."""
        return self._link.comm.Iprobe(self._link.MPI.ANY_SOURCE, SHARED_TAGS[0])

    def take_in(self) -> None:
        """Begins to receive the next, if it is still there, and keeps it."""
        link, status = self._link, self._link.MPI.Status()
        if (found := link.comm.Improbe(link.MPI.ANY_SOURCE, SHARED_TAGS[0], status)) is not None:
            source, (head, memory) = status.Get_source(), receive_head(link, found, status)
            if head.token != link.token:
                return None if head.eager else self._asides.discard(head.nbytes, source, SHARED_TAGS[1])
            early = EarlyMessage(source, head, memory, memory if head.eager else Buffer(head.nbytes), [])
            self.kept.append(early)
            if not head.eager:
                link.receive(early.data.address, head.nbytes, source, SHARED_TAGS[1], early.requests)
        return None

    def of(self, tag: int, peer: int) -> list[EarlyMessage]:
        """Those with that tag from ``peer``; -1: from any rank."""
        return [e for e in self.kept if e.head.tag == tag and peer in (-1, e.source)]

    def close(self) -> None:
        for early in self.kept:
            if not self._link.MPI.Request.Testall(early.requests):
                self._link.give_up(early.requests, early.data)
        self.kept.clear()
