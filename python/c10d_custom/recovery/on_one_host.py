"""The same as over_hosts.py of a default group inside one host, whose ranks have no ports: each makes a socket when it
calls shrink_group, and names it in shared memory."""

from __future__ import annotations

import contextlib
import errno
import secrets
from typing import TYPE_CHECKING, Any

from ..threads import socket
from ..transport import SHRINKS
from ..transport.hosts.layout import Hosts
from ..transport.hosts.meeting_point import MeetingPoint
from ..transport.hosts.own_sockets import own
from ..transport.hosts.tcp_line import TcpLine
from ..transport.shm.segment import is_of_this_user
from .over_hosts import SurvivorsOverHosts

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ..transport.shm import ShmTransport


class Point(MeetingPoint):
    """The ranks' marks in shared memory say that they have come, and name their sockets, to which only processes of
    this user are let."""

    def __init__(self, local: ShmTransport) -> None:
        self.rank, self._local, self._secret = local.rank, local, b""
        mark = SHRINKS | secrets.randbits(31)
        self._server = own(socket.socket(socket.AF_UNIX))
        self._server.bind(_name(mark))
        self._server.listen()
        self._server.setblocking(False)
        local.set_mark(mark)

    def call(self, rank: int) -> TcpLine:
        link = own(socket.socket(socket.AF_UNIX))
        link.setblocking(False)
        states = self._local.states(0)
        came = not link.connect_ex(_name(states[rank].mark if states else 0)) and is_of_this_user(link)
        return TcpLine(link, self._secret, self.rank, rank, 0 if came else errno.EAGAIN)

    def admits(self, link: socket.socket) -> bool:
        return is_of_this_user(link)


def _name(mark: int) -> str:
    return f"\0c10d_custom-left-{mark:x}"


class Survivors(SurvivorsOverHosts):
    def _parts(self) -> tuple[Any, Hosts, MeetingPoint]:
        everyone = list(range(self.old.size))
        return self.old, Hosts(self.rank, [everyone], 0, self.rank, len(everyone)), Point(self.old)

    def agree(self) -> tuple[TCPStore, Any]:
        with contextlib.closing(self.point):
            return super().agree()
