"""Receives between hosts that have found no message."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .message_ticket import MessageTicket


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
        """It need not be here."""
        kind = self._kinds.get(_kind(ticket))
        if kind is not None:
            kind.pop(ticket, None)
            if not kind:
                self._kinds.pop(_kind(ticket), None)

    def first(self, kind: tuple[int, int]) -> MessageTicket | None:
        """The oldest of a kind, or None."""
        return next(iter(self._kinds.get(kind, ())), None)

    def kinds(self) -> list[tuple[int, int]]:
        """(peer, tag) of those that are here; the one with the oldest receive first."""
        oldest = {kind: ticket.number for kind in list(self._kinds) if (ticket := self.first(kind)) is not None}
        return sorted(oldest, key=oldest.__getitem__)

    def tickets(self) -> list[MessageTicket]:
        return [ticket for tickets in list(self._kinds.values()) for ticket in list(tickets)]


def _kind(ticket: MessageTicket) -> tuple[int, int]:
    return ticket.message.peer, ticket.message.tag
