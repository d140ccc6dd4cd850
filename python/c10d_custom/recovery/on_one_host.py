"""Which ranks of a default group inside one host are left, and a new group of them. As over_hosts.py, with less to do:
shared memory shows whose process has ended, so that nobody is taken for gone who is not; and a group is made by a
barrier at its end which all its ranks pass or none does, so that nobody need promise anything."""

from __future__ import annotations

import errno
import secrets
from typing import TYPE_CHECKING, Any

from ..threads import socket
from ..transport import SHRINKS
from ..transport.hosts.layout import Hosts
from ..transport.hosts.meeting_point import MeetingPoint
from ..transport.hosts.own_sockets import own
from ..transport.hosts.tcp_line import At, TcpLine
from ..transport.shm.segment import is_of_this_user
from .over_hosts import SurvivorsOverHosts
from .store import connect

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ..transport.shm import ShmTransport


class Point(MeetingPoint):
    """Made when it is wanted. The ranks' marks in shared memory say that they have come, and name their sockets, to
    which only processes of this user are let."""

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
        error = link.connect_ex(_name(states[rank].mark if states else 0))
        if not error and not is_of_this_user(link):
            error = errno.ECONNREFUSED
        return TcpLine(link, self._secret, self.rank, rank, error)

    def admits(self, link: socket.socket) -> bool:
        return is_of_this_user(link)


def _name(mark: int) -> str:
    return f"\0c10d_custom-left-{mark:x}"


class Survivors(SurvivorsOverHosts):
    promises, redial, settle = False, 5e-3, 5e-3
    ended, hint = "ended", ""

    def _parts(self) -> tuple[Any, Hosts, MeetingPoint]:
        everyone = list(range(self.old.size))
        return self.old, Hosts(self.rank, [everyone], 0, self.rank, len(everyone)), Point(self.old)

    def agree(self) -> tuple[TCPStore, Any]:
        try:
            return super().agree()
        finally:
            self.point.close()

    def known_to_have_ended(self) -> set[int]:
        return set()  # `ended_here` says it all

    def known(self, line: TcpLine) -> At:
        return At.CALLED if line.at is At.REFUSED else line.at  # it has not come yet

    @staticmethod
    def _connect(address: str, port: int) -> TCPStore:
        return connect("127.0.0.1", port)
