"""Where the ranks of a default group over hosts find each other after a loss (recovery/survivors.py), when what
connected them may have died with a rank: each listens at a port, from the group's making on.

There is no thread to it. The kernel answers for a process that is alive, and refuses for one that has ended; a call
waits in its queue until the rank comes to take it. It is made at the address by which the failure detector has reached
that host: of several that a host has, others may lead elsewhere (each host's container bridge, say), where a kernel may
refuse what it knows nothing of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...launch.addresses import listen
from ...threads import own, socket
from .tcp_line import TcpLine

if TYPE_CHECKING:
    from .failure_detector import FailureDetector
    from .layout import Hosts

_AT_ONCE = 64  # calls taken in one look


class MeetingPoint:
    """One rank's. `offer` is what it tells the others, `settle` hears what all have told."""

    def __init__(self, rank: int, hosts: Hosts) -> None:
        self.rank, self._hosts = rank, hosts
        self._server = own(listen())
        self._server.setblocking(False)

    def offer(self, detector: FailureDetector) -> dict[str, Any]:
        hub = self._hosts.ranks[0][0]
        found = {rank: address for rank, address in detector.reached().items() if hub in (rank, self.rank)}
        return {"port": self._server.getsockname()[1], "reached": found}

    def settle(self, offers: Sequence[dict[str, Any]], secret: str) -> None:
        """``offers``: of all ranks; ``secret``: hex, of the group."""
        self._secret = bytes.fromhex(secret)
        ports = [offer["port"] for offer in offers]
        hub = self._hosts.ranks[0][0]  # the first host has reached each other, and each other the first
        self._places: dict[int, tuple[str, int]] = {}
        for ranks in self._hosts.ranks:
            if ranks is self._hosts.here:
                address = "127.0.0.1"
            elif hub in ranks:
                address = offers[self._hosts.here[0]]["reached"][str(hub)]
            else:
                address = offers[hub]["reached"][str(ranks[0])]
            self._places.update({rank: (address, ports[rank]) for rank in ranks})

    def call(self, rank: int) -> TcpLine:
        address = self._places[rank]
        link = own(socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET))
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return TcpLine(link, self._secret, self.rank, rank, link.connect_ex(address))

    def fileno(self) -> int:
        """The listening socket's descriptor, readable while somebody calls."""
        return self._server.fileno()

    def answer(self) -> list[TcpLine]:
        """The connections of those that have called since the last time."""
        lines = []
        for _ in range(_AT_ONCE):
            try:
                link, _ = self._server.accept()
            except OSError:  # nobody more; or gone again, or no descriptor is left
                break
            if self.admits(link):
                own(link).setblocking(False)
                lines.append(TcpLine(link, self._secret, self.rank))
            else:
                link.close()
        return lines

    def admits(self, link: socket.socket) -> bool:
        """Whether its caller is heard at all; if so, it still has to know the secret."""
        return True

    def close(self) -> None:
        self._server.close()
