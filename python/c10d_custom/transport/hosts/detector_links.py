"""The failure detector's connections: between which ranks there are any, and how they are made.

Vocabulary. A host's *first* rank is connected to all others of it, and to the first of the first host, the *hub*. Each
host is also *watched* by the first of the host before it (of the first host: by that of the last), to which all its
ranks are connected. So two see the ends of a host's other ranks, and of its first one the watcher; what a rank hears
reaches all by way of the hub or, without that, from host to host. A rank that is not the first of its host has two
connections, however large the job is; a first one, besides those of the two hosts, one or two, the hub one to each
host. The first ranks of two hosts have a second one besides, the *silent* one, over which nothing is ever sent: a
process that is killed may take long to end, and a kernel resets a connection where anything came meanwhile."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import TransportError
from ...launch.addresses import addresses, listen
from ...launch.door import HERE, TOKEN_BYTES, Door, hello
from ...threads import own, socket, time

if TYPE_CHECKING:
    from ...creation.exchange import Exchange


_SILENT = 1 << 31  # and its rank is what a caller says that it is, where it calls for the silent connection
_CONNECT_SECONDS = 3.0
_SLICE = 20e-3  # s: between two looks at who is alive


class Neighbours:
    """Of one rank. ``hosts``: the group ranks of each host. ``connects_to``: the ranks that it connects to;
    ``accepts``: those that connect to it; ``watched``: those of which it sees all of a host's ends, or all but its own;
    ``silent``: those to which there is a silent connection, too."""

    def __init__(self, rank: int, hosts: Sequence[list[int]]) -> None:
        at = next(at for at, ranks in enumerate(hosts) if rank in ranks)
        first, hub = hosts[at][0], hosts[0][0]
        self.here = hosts[at]
        self.connects_to: set[int] = set()
        self.accepts: set[int] = set()
        self.watched: set[int] = set()
        if rank != hub:
            self.connects_to = {hosts[at - 1][0], hub if rank == first else first}
        if rank == first:
            after = hosts[(at + 1) % len(hosts)]
            self.watched = {*hosts[at], *after} - {rank}
            self.accepts = self.watched - {hub}
        if rank == hub:
            self.accepts.update(ranks[0] for ranks in hosts[1:])
        firsts = {ranks[0] for ranks in hosts}
        self.silent = (self.connects_to | self.accepts) & firsts if rank == first else set()


def connect(exchange: Exchange, neighbours: Neighbours) -> tuple[dict[socket.socket, int], dict[socket.socket, int]]:
    """({connection: the rank at its other end}, the same of the silent ones). Collective over the group."""
    links: dict[socket.socket, int] = {}  # rank, or _SILENT + rank
    with contextlib.ExitStack() as cleanup:
        door = None
        if neighbours.accepts:
            server = listen(not neighbours.accepts <= set(neighbours.here))
            token = secrets.token_bytes(TOKEN_BYTES)
            cleanup.callback(server.close)
            silent = {_SILENT + rank for rank in neighbours.accepts & neighbours.silent}
            door = Door(server, token, neighbours.accepts | silent)
            cleanup.callback(door.close)
            exchange.say(
                f"failure_detector/{exchange.rank}",
                {"port": server.getsockname()[1], "token": token.hex(), "addresses": addresses()},
            )
        calls = [
            _Call(exchange, rank, rank in neighbours.here, silent)
            for rank in sorted(neighbours.connects_to)
            for silent in ([0, _SILENT] if rank in neighbours.silent else [0])
        ]
        # Those who call this rank have their answers before it waits for its own, or each host would wait for the one
        # before it.
        while door is not None and door.waiting:
            links.update(door.admit(_SLICE))
            if door.waiting:
                exchange.require_all_going_on()
                if exchange.left() <= _SLICE:
                    ranks = sorted({number % _SILENT for number in door.waiting})
                    raise TransportError(
                        f"group creation: ranks {ranks} did not connect to rank {exchange.rank} in time"
                    )
        links.update((call.answered(), call.rank + call.silent) for call in calls)
    for link in links:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own(link).setblocking(False)
    loud = {link: number for link, number in links.items() if number < _SILENT}
    return loud, {link: number - _SILENT for link, number in links.items() if number >= _SILENT}


class _Call:
    """A connection to ``rank``, the silent one if ``silent`` is _SILENT and not 0. Once this is made somebody has been
    reached, and told who calls."""

    _link: socket.socket

    def __init__(self, exchange: Exchange, rank: int, same_host: bool, silent: int) -> None:
        self.rank, self.silent, self._exchange = rank, silent, exchange
        offer: dict[str, Any] = exchange.hear(f"failure_detector/{rank}", f"rank {rank}")
        self._port, self._token = offer["port"], bytes.fromhex(offer["token"])
        self._addresses: list[str] = ["127.0.0.1"] * same_host + offer["addresses"]
        self._next = 0  # of these
        self._tried: list[str] = []
        self._dial()

    def answered(self) -> socket.socket:
        """The connection. Somebody else may have that address, too, and then another is tried."""
        while True:
            try:
                self._link.settimeout(self._patience())
                if self._link.recv(len(self._token), socket.MSG_WAITALL) == self._token:
                    self._link.sendall(HERE)
                    return self._link
                self._tried[-1] += "not the one"
            except OSError as error:
                self._tried[-1] += str(error)
            self._link.close()
            self._dial()

    def _dial(self) -> None:
        """At the next address at which somebody answers."""
        while True:
            if self._next == len(self._addresses):
                self._require_time()
                self._next = 0
                continue
            address = self._addresses[self._next]
            self._next += 1
            self._tried.append(f"{address}: ")
            try:
                self._link = socket.create_connection((address, self._port), self._patience())
            except OSError as error:
                self._tried[-1] += str(error)
                continue
            try:
                self._link.sendall(hello(self._token, self.silent + self._exchange.rank))
                return
            except OSError as error:
                self._tried[-1] += str(error)
                self._link.close()

    def _patience(self) -> float:
        return min(_CONNECT_SECONDS, self._exchange.left())

    def _require_time(self) -> None:
        self._exchange.require_all_going_on()
        if self._exchange.left() < 0.1:
            raise TransportError(
                f"group creation: rank {self._exchange.rank} cannot connect to rank {self.rank} by TCP "
                f"({'; '.join(self._tried[-4:])})"
            )
        time.sleep(0.05)
