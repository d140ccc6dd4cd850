"""Messages with tags beyond those of MPI (MPICH's end at 2^29). They share one tag, and are told apart by their heads;
what comes before its receive is taken in and kept: heads, and short messages as far as there is room (room.py)."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .message_ticket import SHARED_TAGS, Head, receive_head

if TYPE_CHECKING:
    from .link import Buffer, MpiLink


@dataclass(eq=False, slots=True)
class EarlyMessage:
    """``memory``: the head's, and the bytes' where they came with it."""

    arrival: int
    source: int
    head: Head
    memory: Buffer


class EarlyMessages:
    """Of one group."""

    def __init__(self, link: MpiLink) -> None:
        self._link = link
        self._kept: dict[tuple[int, int], deque[EarlyMessage]] = {}  # by source and tag, as they came
        self._arrivals = itertools.count()

    def has_come(self) -> bool:
        """Whether there is one to take in."""
        return self._link.comm.Iprobe(self._link.MPI.ANY_SOURCE, SHARED_TAGS[0])

    def take_in(self) -> None:
        """Receives the next, if it is still there, and keeps it."""
        link, status = self._link, self._link.MPI.Status()
        if (found := link.comm.Improbe(link.MPI.ANY_SOURCE, SHARED_TAGS[0], status)) is not None:
            head, memory = receive_head(link, found, status)
            if head.token == link.token:
                early = EarlyMessage(next(self._arrivals), status.Get_source(), head, memory)
                self._kept.setdefault((early.source, head.tag), deque()).append(early)

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
