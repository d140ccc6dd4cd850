"""Who is gone, told between hosts over TCP connections: what goes over them, and whose word counts.

MPI does not say that a rank has died (its launcher kills the job, or the survivors hang), so the ranks of a group also
hold TCP connections that carry nothing but bad news (detector_links.py: between whom). A process that dies, however it
dies, closes its connections, and its kernel says so within milliseconds; a rank that is only slow or stopped does not.
What one rank hears it tells all it is connected to, and they those they are connected to, each thing once.

Errors name who died first. torchrun, for one, ends the other ranks of a host as soon as one has died, so that whoever
is connected to one of those alone would name it instead. A kernel closes a process's connections before another process
can know of its end, and epoll hands out ends in the order in which they came (Linux keeps its ready list so; a poll
would go by descriptors). So who watches a host sees which of its ranks was first, and says so at once; who sees an end
on another host and does not watch that waits for the word (_WORD), and takes what it has seen for the reason only if
none comes.

A disagreement about collective N does not fail collectives before N, in which a slower rank may still be. Any other
fault fails all of them, and may still be reported after a disagreement.

A connection ends in good order (FIN) or is reset (RST), which a firewall may do, too. Only a FIN proves that the
process has ended while its host goes on: recovery/survivors.py rests on that. All ranks are told of each FIN, but for
those of the host that it came from: they see the end in shared memory, and may be about to end themselves.

The kernel resets the connections of a process that ends before it has read all that came for it. So a process that is
about to end is told as little as can be; and the first ranks of two hosts have a second connection, on which nothing is
ever sent, and which therefore always ends by FIN.

A rank that leaves in good order says so first, on each of its connections. A host without power or behind a cut cable
closes no connection: that is for the waits' deadlines.

The thread here hears at once. Whoever is about to send to another host looks whether there is news that it has not read
(`failure_news`), and then raises an error in place of sending to a process that is gone. A rank that waits looks at
what it has heard (health.py) every 2 ms (_CHECK in link.py, SLICE_NS in leader_all_reduce.py, kSliceOverMpi in
backend/shm/waiting.h), 5 ms (_CHECK in messages.py) or, inside its host, 10 ms, later 50 (kSlice and kLongSlice there).
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import native
from ...errors import TransportError
from ...native import over_hosts
from ...threads import select, socket, threading
from .detector_links import Neighbours, connect

if TYPE_CHECKING:
    from ...creation.exchange import Exchange


_NEWS = struct.Struct("<IIiiQ")  # kind, status, rank it is about, rank that found out, number
_LEFT, _FAILED, _ENDED, _SHRINKS = 1, 2, 3, 4
_WORD = 0.2  # s: for the word of who watches the host of a rank whose end another has seen
_READ = 4096  # bytes
_OVER = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


@dataclass(frozen=True)
class Fault:
    """Why the group is of no more use: a native status and what belongs to it, in group ranks."""

    status: int
    peer: int
    by: int
    number: int


class FailureDetector:
    """Opening it is collective over the group. ``hosts``: the group ranks of each host.
    ``on_fault``: called in the detector's thread with a Fault that another rank reports."""

    def __init__(
        self, exchange: Exchange, hosts: Sequence[list[int]], on_fault: Callable[[Fault], object] = lambda fault: None
    ) -> None:
        self.rank = exchange.rank
        self.left: set[int] = set()
        self.ended: set[int] = set()  # their hosts have ended a connection of theirs, as when a process ends
        self.shrinking: set[int] = set()  # they have called shrink_group
        self.fault: Fault | None = None
        self.disagreement: Fault | None = None
        self._on_fault = on_fault
        self._host = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self._pending: list[tuple[int, ...]] = []  # news to send, made by other threads
        self._suspected: dict[int, float] = {}  # rank whose end was seen -> until when somebody's word is awaited
        self._lock = threading.RLock()  # a signal handler may interrupt who holds it, and report, too
        self._closing = False
        neighbours = Neighbours(self.rank, hosts)
        self._watched = neighbours.watched
        self._links, self._silent = connect(exchange, neighbours)  # socket -> rank at its other end
        # Two first ranks have two connections. The silent one's end counts only once the ordinary one has ended, too:
        # on that the rank may still have said why it goes.
        self._over: set[int] = set()  # ranks whose silent connection has ended in good order
        self._resets: set[int] = set()  # ranks whose other one was reset
        self._unread = dict.fromkeys(self._links, b"")
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        for link in (*self._links, *self._silent):
            # Edge-triggered: what has been handed out goes to the end of the order when more comes.
            self._epoll.register(link, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        self._readable = select.poll()
        self._readable.register(self._epoll, select.POLLIN)
        self.failure_news = over_hosts.FailureNews(self._epoll.fileno(), 0)  # see backend/hosts/failure_news.h
        self._gone_without_leave = False
        self._thread = threading.Thread(target=self._run, name="c10d_custom:failure_detector", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} gets no thread to hear of failures by (clone, clone3): ulimit -u says how many a "
                "user may have, and a sandbox may refuse the call"
            ) from error

    def tell(self, on_fault: Callable[[Fault], object]) -> None:
        """From now on, and of what was heard before."""
        self._on_fault = on_fault
        for fault in filter(None, (self.disagreement, self.fault)):
            on_fault(fault)

    def report(self, fault: Fault) -> None:
        """This rank found out; the others will know. Later faults are not news, unless all before was a
        disagreement."""
        if not self._is_news(fault):
            return
        self._send(_FAILED, fault.status, fault.peer, fault.by, fault.number)

    def shrink(self) -> None:
        """This rank has called shrink_group."""
        self._send(_SHRINKS, 0, self.rank, self.rank, 0)

    def leave(self) -> None:
        """This rank wants nothing more of the group."""
        self._send(_LEFT, 0, self.rank, self.rank, 0)

    def reached(self) -> dict[int, str]:
        """{a rank that this one is connected to: its address}"""
        return {rank: link.getpeername()[0].removeprefix("::ffff:") for link, rank in self._links.items()}

    def trouble(self, number: int) -> Fault | None:
        """The Fault that is one for the collective ``number``; None: there is none."""
        disagreement = self.disagreement
        if disagreement is not None and disagreement.number <= number:
            return disagreement
        return self.fault

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.write(self._waker, b"x")
        self._thread.join(5.0)
        self.failure_news.unread = -1
        for link in (*self._links, *self._silent):
            link.close()
        self._epoll.close()
        os.close(self._wake)
        os.close(self._waker)

    def _send(self, *news: int) -> None:
        with self._lock:
            self._pending.append(news)
            if not self._closing:
                os.write(self._waker, b"x")

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

    # --- the thread

    def _run(self) -> None:
        by_fd = {link.fileno(): link for link in (*self._links, *self._silent)}
        while True:
            self._readable.poll(self._patience())
            self.failure_news.kept = 1
            for fd, event in self._epoll.poll(0):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, _READ)
                elif (link := by_fd[fd]) in self._silent:
                    self._silent_one_is_over(link)
                else:
                    self._read(link, bool(event & _OVER))
            self._believe_what_was_seen()
            with self._lock:
                news, self._pending, closing = self._pending, [], self._closing
            for one in news:
                self._spread(one)
            self.failure_news.kept = int(self._gone_without_leave)
            if closing:
                return

    def _read(self, link: socket.socket, over: bool) -> None:
        """Reads what that event told of. ``over``: it told of the connection's end, too, so read up to that. An end
        that has come since is left to an event of its own: so ends are seen in their order."""
        while True:
            try:
                data = link.recv(_READ)
            except BlockingIOError:
                return
            except OSError:
                return self._gone(link, False)
            if not data:
                return self._gone(link, True)
            self._unread[link] += data
            while len(self._unread[link]) >= _NEWS.size:
                news, self._unread[link] = self._unread[link][: _NEWS.size], self._unread[link][_NEWS.size :]
                self._heard(link, _NEWS.unpack(news))
            if not over and len(data) < _READ:
                return

    def _silent_one_is_over(self, link: socket.socket) -> None:
        try:
            ended = not link.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            ended = False
        self._epoll.unregister(link)
        rank = self._silent.pop(link)
        link.close()
        if ended:
            self._over.add(rank)
            if rank in self._resets:
                self._has_ended(rank)

    def _heard(self, link: socket.socket, news: tuple[int, ...]) -> None:
        kind, status, peer, by, number = news
        if kind == _LEFT:
            if peer not in self.left:
                self.left.add(peer)
                self._spread(news, but=link)
        elif kind == _SHRINKS:
            if peer not in self.shrinking:
                self.shrinking.add(peer)
                self._spread(news, but=link)
        elif kind == _ENDED:
            self._gone_without_leave |= peer not in self.left
            self._has_ended(peer, link)
        elif kind == _FAILED and status in (native.TIMEOUT, native.PEER_LOST, native.MISMATCH, *native.ENDED_HERE):
            self._fail(Fault(status, peer, by, number), link)

    def _gone(self, link: socket.socket, ended: bool) -> None:
        self._epoll.unregister(link)
        rank = self._links[link]
        self._gone_without_leave |= rank not in self.left
        if ended or rank in self._over:
            self._has_ended(rank)
        else:
            self._resets.add(rank)
        if rank in self._watched or self._host[rank] == self._host[self.rank]:
            self._lost(rank)
        else:
            self._suspected[rank] = time.monotonic() + _WORD

    def _has_ended(self, rank: int, told_by: socket.socket | None = None) -> None:
        if rank not in self.ended:
            self.ended.add(rank)
            self._spread((_ENDED, 0, rank, self.rank, 0), but=told_by)

    def _patience(self) -> float | None:
        """How long to wait for events, in ms; None: for one."""
        return 1e3 * max(0.0, min(self._suspected.values()) - time.monotonic()) if self._suspected else None

    def _believe_what_was_seen(self) -> None:
        for rank, until in list(self._suspected.items()):
            if time.monotonic() >= until:
                del self._suspected[rank]
                self._lost(rank)

    def _lost(self, rank: int) -> None:
        if rank not in self.left and not self._closing:
            self._fail(Fault(native.PEER_LOST, rank, self.rank, 0))

    def _fail(self, fault: Fault, told_by: socket.socket | None = None) -> None:
        if self._is_news(fault):
            self._on_fault(fault)
            self._spread((_FAILED, fault.status, fault.peer, fault.by, fault.number), but=told_by)

    def _spread(self, news: tuple[int, ...], but: socket.socket | None = None) -> None:
        data, untold = _NEWS.pack(*news), self._who_see_for_themselves(*news[:3])
        for link, rank in self._links.items():
            if link is not but and self._host[rank] != untold:
                # A few bytes now and then: they fit the socket's buffer, unless the peer is beyond help.
                with contextlib.suppress(OSError):
                    link.send(data, socket.MSG_NOSIGNAL)

    def _who_see_for_themselves(self, kind: int, status: int, about: int) -> int | None:
        """The host, another one, whose ranks need not be told that news."""
        ended = kind == _ENDED or kind == _FAILED and status == native.PEER_LOST and about in self.ended - self.left
        host = self._host[about] if ended else None
        return None if host == self._host[self.rank] else host
