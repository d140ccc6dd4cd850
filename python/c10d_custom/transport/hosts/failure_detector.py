"""Who is gone, told between hosts over TCP connections: which there are, and what goes over them.

MPI does not say that a rank has died (its launcher kills the job, or the survivors hang), so the ranks
of a group also hold TCP connections that carry nothing but bad news. They form a tree: the first rank
of each host, its leader, is connected to the first host's leader; the other ranks of a host to theirs.
A process that dies, however it dies, closes its connections, and its kernel says so within
milliseconds; a rank that is only slow or stopped does not. News spreads through the whole tree.

A disagreement about a collective is no reason for an earlier one, in which a slower rank may still be, to fail; a worse
fault, which is, may follow it.

That a connection has ended in good order, by its other end's doing, is told apart from its being reset, which a
firewall may do: c10d/survivors_over_hosts.py takes it for proof that the process has ended, and its host has not. All
ranks are told of each such end.

A rank that leaves in good order says so first. What hung below it in the tree is then no longer
watched from beyond it; waits there have their deadlines. A host without power or behind a cut cable closes no
connection: that, too, is for the deadlines.

The thread here hears at once. A rank that waits looks at what it has heard (health.py) every 2 ms (_CHECK in link.py,
SLICE_NS in leader_all_reduce.py, kLook in backend/shm/pipelined_reduce.cpp), 5 ms (_CHECK in messages.py) or, inside
its host, 10 ms (kSlice in backend/shm/group.h).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ... import native
from ...errors import TransportError
from ...launch.addresses import addresses, listen
from .own_sockets import own

if TYPE_CHECKING:
    from ...creation.exchange import Exchange


_HELLO = struct.Struct("<16sI")
_NEWS = struct.Struct("<IIiiQ")  # kind, status, rank it is about, rank that found out, number
_LEFT, _FAILED, _ENDED = 1, 2, 3
_CONNECT_SECONDS = 3.0
_STRANGERS = 64  # connections that have said nothing yet, besides one for each rank
_AT_ONCE = 64  # connections taken between two looks at those that are there
_SLICE = 20e-3  # s: between two looks at who is alive


@dataclass(frozen=True)
class Fault:
    """Why the group is of no more use: a native status and what belongs to it, in group ranks."""

    status: int
    peer: int
    by: int
    number: int


class _Door:
    """Where the ranks below this one connect. Anybody can: all are heard at once, in few bytes, and none is waited for;
    those that say nothing are closed when there are too many, the oldest first."""

    def __init__(self, server: socket.socket, token: bytes, ranks: Sequence[int]) -> None:
        self._server, self._token = server, token
        self.waiting = set(ranks)
        self._most = len(self.waiting) + _STRANGERS
        self._silent: dict[socket.socket, bytes] = {}  # connection -> what it has said so far; the oldest first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def admit(self, seconds: float) -> list[tuple[socket.socket, int]]:
        """[(connection, rank)] of those that have come within that time."""
        ready: list[Any] = [key.fileobj for key, _ in self._selector.select(seconds)]
        heard = [(link, self._hear(link)) for link in ready if link is not self._server]
        if self._server in ready:
            self._accept()  # last: it may close those that have said nothing
        return [(link, rank) for link, rank in heard if rank is not None]

    def close(self) -> None:
        for link in list(self._silent):
            self._drop(link)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._silent) >= self._most:
                self._drop(next(iter(self._silent)))
            try:
                link, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # of a connection that is gone, or no descriptor is left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if not self._silent:
                        raise
                    self._drop(next(iter(self._silent)))
                continue
            link.setblocking(False)
            self._silent[link] = b""
            self._selector.register(link, selectors.EVENT_READ)

    def _hear(self, link: socket.socket) -> int | None:
        """The rank that it is; None: not known yet, or closed as a stranger's."""
        try:
            said = link.recv(_HELLO.size - len(self._silent[link]))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        self._silent[link] += said
        if len(self._silent[link]) < _HELLO.size:
            if not said:
                self._drop(link)
            return None
        token, rank = _HELLO.unpack(self._silent[link])
        try:
            if secrets.compare_digest(token, self._token) and rank in self.waiting:
                link.send(self._token)
                self._forget(link)
                self.waiting.discard(rank)
                return rank
        except OSError:
            pass
        self._drop(link)
        return None

    def _forget(self, link: socket.socket) -> None:
        del self._silent[link]
        self._selector.unregister(link)

    def _drop(self, link: socket.socket) -> None:
        self._forget(link)
        link.close()


class FailureDetector:
    """Opening it is collective over the group. ``hosts``: the group ranks of each host.
    ``on_fault``: called in the detector's thread with a Fault that another rank reports."""

    def __init__(self, exchange: Exchange, hosts: Sequence[list[int]], on_fault: Callable[[Fault], object]) -> None:
        self.rank = exchange.rank
        self.left: set[int] = set()
        self.ended: set[int] = set()  # their hosts have ended a connection of theirs, as when a process ends
        self.fault: Fault | None = None
        self.disagreement: Fault | None = None
        self._on_fault = on_fault
        self._links: dict[socket.socket, int] = {}  # socket -> rank at its other end
        self._pending = b""  # news to send, made by other threads
        self._lock = threading.RLock()  # a signal handler may interrupt who holds it, and report, too
        self._closing = False
        self._connect(exchange, hosts)
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="c10d_custom:failure_detector", daemon=True)
        self._thread.start()

    def report(self, fault: Fault) -> None:
        """This rank found out; the others will know. Later faults are not news, unless all before was a
        disagreement."""
        if not self._is_news(fault):
            return
        self._send(_FAILED, fault.status, fault.peer, fault.by, fault.number)

    def leave(self) -> None:
        """This rank wants nothing more of the group."""
        self._send(_LEFT, 0, self.rank, self.rank, 0)

    def reached(self) -> dict[int, str]:
        """{a rank that this one is connected to: its address}"""
        return {rank: link.getpeername()[0].removeprefix("::ffff:") for link, rank in self._links.items()}

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.write(self._waker, b"x")
        self._thread.join(5.0)
        for link in self._links:
            link.close()
        os.close(self._wake)
        os.close(self._waker)

    # --- connecting

    def _connect(self, exchange: Exchange, hosts: Sequence[list[int]]) -> None:
        mine = next(h for h in hosts if self.rank in h)
        leader, hub = mine[0], hosts[0][0]
        parent = None if self.rank == hub else hub if self.rank == leader else leader
        children = mine[1:] if self.rank == leader else []
        if self.rank == hub:
            children = children + [h[0] for h in hosts[1:]]
        with contextlib.ExitStack() as cleanup:
            if children:
                server, token = listen(not set(children) <= set(mine)), secrets.token_bytes(16)
                cleanup.callback(server.close)
                door = _Door(server, token, children)
                cleanup.callback(door.close)
                exchange.say(
                    f"failure_detector/{self.rank}",
                    {"port": server.getsockname()[1], "token": token.hex(), "addresses": addresses()},
                )
            if parent is not None:
                offer = exchange.hear(f"failure_detector/{parent}", f"rank {parent}")
                self._links[self._call(offer, parent, parent in mine, exchange)] = parent
            while children and door.waiting:
                self._links.update(door.admit(_SLICE))
                if door.waiting:
                    exchange.require_all_alive()
                    if exchange.left() <= _SLICE:
                        raise TransportError(
                            f"group creation: ranks {sorted(door.waiting)} did not connect to rank {self.rank} in time"
                        )
        for link in self._links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own(link).setblocking(False)

    def _call(self, offer: dict[str, Any], parent: int, same_host: bool, exchange: Exchange) -> socket.socket:
        addresses, token = offer["addresses"], bytes.fromhex(offer["token"])
        if same_host:
            addresses = ["127.0.0.1", *addresses]
        tried = []
        while True:
            for address in addresses:
                link = None
                try:
                    link = socket.create_connection((address, offer["port"]), min(_CONNECT_SECONDS, exchange.left()))
                    link.sendall(_HELLO.pack(token, self.rank))
                    # Some other host may have that address, too.
                    if link.recv(len(token), socket.MSG_WAITALL) == token:
                        return link
                    tried.append(f"{address}: not the one")
                except OSError as error:
                    tried.append(f"{address}: {error}")
                if link is not None:
                    link.close()
            exchange.require_all_coming()
            if exchange.left() < 0.1:
                raise TransportError(
                    f"group creation: rank {self.rank} cannot connect to rank {parent} by TCP ({'; '.join(tried[-4:])})"
                )
            time.sleep(0.05)

    # --- the thread

    def _send(self, *news: int) -> None:
        data = _NEWS.pack(*news)
        with self._lock:
            self._pending += data
            if not self._closing:
                os.write(self._waker, b"x")

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_fd = {link.fileno(): link for link in self._links}
        received = dict.fromkeys(self._links, b"")
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    continue
                link = by_fd[fd]
                ended = True
                try:
                    data = link.recv(4096)
                except BlockingIOError:
                    continue
                except OSError:
                    data, ended = b"", False
                if not data:
                    poll.unregister(fd)
                    self._gone(self._links[link], ended)
                    continue
                received[link] += data
                while len(received[link]) >= _NEWS.size:
                    self._news(link, received[link][: _NEWS.size])
                    received[link] = received[link][_NEWS.size :]
            with self._lock:
                out, self._pending, closing = self._pending, b"", self._closing
            if out:
                self._spread(out)
            if closing:
                return

    def _spread(self, data: bytes, but: socket.socket | None = None) -> None:
        for link in self._links:
            if link is not but:
                # A few bytes now and then: they fit the socket's buffer, unless the peer is beyond help.
                with contextlib.suppress(OSError):
                    link.send(data, socket.MSG_NOSIGNAL)

    def _news(self, link: socket.socket, data: bytes) -> None:
        kind, status, peer, by, number = _NEWS.unpack(data)
        if kind == _LEFT:
            if peer not in self.left:
                self.left.add(peer)
                self._spread(data, but=link)
        elif kind == _ENDED:
            self._has_ended(peer, link)
        elif kind == _FAILED and status in (native.TIMEOUT, native.PEER_LOST, native.MISMATCH, native.ABORTED):
            if self._fail(Fault(status, peer, by, number)):
                self._spread(data, but=link)

    def _has_ended(self, rank: int, told_by: socket.socket | None = None) -> None:
        if rank not in self.ended:
            self.ended.add(rank)
            self._spread(_NEWS.pack(_ENDED, 0, rank, self.rank, 0), but=told_by)

    def _gone(self, rank: int, ended: bool) -> None:
        if ended:
            self._has_ended(rank)
        if rank not in self.left and not self._closing:
            fault = Fault(native.PEER_LOST, rank, self.rank, 0)
            if self._fail(fault):
                self._spread(_NEWS.pack(_FAILED, fault.status, fault.peer, fault.by, fault.number))

    def _fail(self, fault: Fault) -> bool:
        if not self._is_news(fault):
            return False
        self._on_fault(fault)
        return True

    def _is_news(self, fault: Fault) -> bool:
        with self._lock:
            if self.fault is not None:
                return False
            if fault.status != native.MISMATCH:
                self.fault = fault
            elif self.disagreement is None:
                self.disagreement = fault
            else:
                return False
            return True

    def trouble(self, number: int) -> Fault | None:
        """The Fault that is one for the collective ``number``; None: there is none."""
        disagreement = self.disagreement
        if disagreement is not None and disagreement.number <= number:
            return disagreement
        return self.fault
