"""Bytes between the ranks of one group over MPI: non-blocking underneath, so that every wait has a deadline and looks
at who is gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char, memmove
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

from ... import native
from ...errors import TransportError
from ...launch.communicators import create, is_open_mpi
from ...launch.mpi_job import PIECE
from ...native import over_hosts
from ...threads import OVER_MPI, rest, time, wait_until
from ..trouble import Trouble
from . import given_up

if TYPE_CHECKING:
    from mpi4py.MPI import Message as Found
    from mpi4py.MPI import Request

    from ...creation.exchange import Exchange
    from ...launch.mpi_job import Job

    Test = Callable[..., bool]


# Kinds of message, by MPI tag; LARGE_TAGS are two. Point-to-point messages use the tags from POINT_TO_POINT on.
HEADER, DATA, ROUND, NOTHING, LARGE_TAGS = 0, 1, 2, 3, 4
SUMS, REFUSAL, ROOM_WORD, ASKED, POINT_TO_POINT = 6, 7, 8, 9, 16

_MOMENT = 5e-3  # s: for what is on its way already
_CHECK = 2e-3  # s between two looks at the group's health
_NEWS = 0.5  # s: that a send waits at most for news that is about to come
_CREATION_TAGS = 32000  # MPI has at least these
_LEAVING = 0.3  # s: for bytes that are under way into memory that a failed call had from its caller


class MpiLink:
    """A communicator of its own for the group. ``ranks``: the rank in COMM_WORLD of each group rank; ``token``: of
    this making of the group alone, for MPI gives the communicator of a group that is gone to another, with what nobody
    received. Opening it is collective over the group. ``check``: raises Trouble if the group is of no more use, or a
    rank of those it is given is gone; ``failure_news``: of the failure detector."""

    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        ranks: Sequence[int],
        token: int,
        check: Callable[[Sequence[int]], None],
        failure_news: over_hosts.FailureNews,
    ) -> None:
        self.rank, self.size, self.token = exchange.rank, exchange.size, token
        self.MPI = job.MPI
        self.check, self.failure_news = check, failure_news
        self._gave_up = False
        self.carries_messages = False  # some may still come that nobody receives
        given_up.collect(self.MPI)
        # Each communicator is made with a tag of its own. For a rank that died while another was being made may have
        # left a message, which must not be taken for one of this making.
        tag = token % _CREATION_TAGS
        self.comm = create(job, ranks, tag, exchange.left(), exchange.require_all_coming)
        self.comm.Set_errhandler(self.MPI.ERRORS_RETURN)
        self.tag_limit: int = self.comm.Get_attr(self.MPI.TAG_UB) or 0
        self._view = self.MPI.buffer.fromaddress
        self._byte = self.MPI.BYTE

    # --- bytes

    def send(
        self, address: int, nbytes: int, peer: int, tag: int = DATA, requests: list[Request] | None = None
    ) -> list[Request]:
        """Requests of the send of ``nbytes`` at ``address``, cut into pieces; added to ``requests`` if given, as each
        is made, so that none is lost to a signal handler that raises."""
        self.before_sending()
        return self.pieces(self.comm.Isend, address, nbytes, peer, tag, requests)

    def before_sending(self) -> None:
        """Raises Trouble where the failure detector has heard, or is about to, that the group is of no more use."""
        over_hosts.lib.c10d_transfer_begins()
        began = 0.0
        while over_hosts.lib.c10d_failure_news_came(self.failure_news):
            began = began or time.monotonic()
            if (waited := time.monotonic() - began) > _NEWS:
                break
            self.check([])
            rest(OVER_MPI, waited)

    def receive(
        self, address: int, nbytes: int, peer: int, tag: int = DATA, requests: list[Request] | None = None
    ) -> list[Request]:
        return self.pieces(self.comm.Irecv, address, nbytes, peer, tag, requests)

    def pieces(
        self,
        make: Callable[..., Request],
        address: int,
        nbytes: int,
        peer: int,
        tag: int = DATA,
        requests: list[Request] | None = None,
    ) -> list[Request]:
        """What ``make``, a method of the communicator, makes of each piece: Send_init a request to be started again and
        again."""
        made = [] if requests is None else requests
        pieces = [[self._view(address + at, min(PIECE, nbytes - at)), self._byte] for at in range(0, nbytes, PIECE)]
        made.extend(map(make, pieces, repeat(peer), repeat(tag)))
        return made

    @staticmethod
    def lengths(nbytes: int) -> list[int]:
        """The lengths of the pieces that a message of so many bytes is sent in."""
        return [min(PIECE, nbytes - at) for at in range(0, nbytes, PIECE)]

    def wait(
        self,
        requests: Sequence[Request],
        deadline: float,
        peers: Sequence[int],
        keep: object = None,
        lengths: Sequence[int] = (),
    ) -> None:
        """Until all are complete. Raises Trouble: time-out, a rank of ``peers`` gone, or the group
        broken; what is under way then is given up, and ``keep`` kept, as MPI may still touch it. ``lengths``: where
        ``requests`` are receives whose messages MPI might take for whole that are not, what each has to bring."""
        statuses = [self.MPI.Status() for _ in lengths]
        test: Test = self.MPI.Request.Testall
        try:
            self._wait(requests, deadline, peers, partial(test, statuses=statuses) if statuses else test)
            for status, length in zip(statuses, lengths):
                if status.Get_count(self._byte) != length:
                    raise TransportError(
                        f"MPI has brought {status.Get_count(self._byte)} bytes of rank {status.Get_source()}, instead "
                        f"of the {length} that both ranks have announced"
                    )
        except BaseException:
            self.give_up(requests, keep)
            raise

    def _wait(self, requests: Sequence[Request], deadline: float, peers: Sequence[int], test: Test) -> None:
        try:
            begun = checked = time.monotonic()
            while not test(requests):
                now = time.monotonic()
                if now - checked > _CHECK:
                    checked = now
                    if self.look(requests, deadline, peers, test):
                        return
                rest(OVER_MPI, now - begun)
        except self.MPI.Exception as error:
            if error.Get_error_class() == self.MPI.ERR_TRUNCATE:
                raise Trouble(native.MISMATCH) from error
            raise TransportError(f"MPI: {error}") from error

    def look(
        self, requests: Sequence[Request], deadline: float, peers: Sequence[int], test: Test | None = None
    ) -> bool:
        """Raises Trouble if a wait for ``requests`` is in vain, or too long. True: they are complete, as ``test`` of
        them has said (None: MPI's Testall)."""
        over_hosts.lib.c10d_mpi_is_called()
        try:
            self.check(peers)
        except Trouble:
            # It may have done its part and then gone.
            if self.settle(requests, test):
                return True
            raise
        given_up.collect(self.MPI, now_and_then=True)
        if time.monotonic() >= deadline:
            raise self.late(requests, peers)
        return False

    def settle(self, requests: Sequence[Request], test: Test | None = None) -> bool:
        """Returns whether all become complete within a moment."""
        until, test = time.monotonic() + _MOMENT, test or self.MPI.Request.Testall
        while not (done := test(requests)) and time.monotonic() < until:
            os.sched_yield()
        return done

    def late(self, requests: Sequence[Request], peers: Sequence[int]) -> Trouble:
        """The Trouble of a time-out. ``requests`` begin with one of each of ``peers``, or are of all of them."""
        late = list(peers)
        if len(requests) >= len(peers) > 1:
            done = self.MPI.Request.Testsome(requests) or []
            late = [p for i, p in enumerate(peers) if i not in done] or late
        return Trouble(native.TIMEOUT, late[0] if late else -1, missing=late)

    def withdraw(self, receives: Sequence[Request], keep: object) -> None:
        """Of a call that has failed: nothing more comes into the memory of these. What has not begun to come is
        cancelled; what is under way is awaited for a moment, and else ``keep`` kept, since MPI may still write
        there."""
        if not receives:  # MPI itself may be over
            return
        with given_up.lock:
            try:
                self._cancel(receives)
                done = wait_until(lambda: self.MPI.Request.Testall(receives), OVER_MPI, _LEAVING)
            except self.MPI.Exception:
                done = False
        if not done:
            self.give_up(receives, keep)

    def give_up(self, requests: Sequence[Request], keep: object, receives: Sequence[Request] = ()) -> None:
        """MPI may go on with these, of a group that has failed, for as long as it likes: ``keep`` is kept meanwhile.
        Those of them that are ``receives`` are cancelled."""
        self._gave_up = True
        with given_up.lock:
            self._cancel(receives)
        given_up.keep(requests, keep)

    def _cancel(self, receives: Sequence[Request]) -> None:
        for request in receives:
            if request != self.MPI.REQUEST_NULL:
                with contextlib.suppress(self.MPI.Exception):  # of one that is not under way
                    request.Cancel()

    def close(self, healthy: bool) -> None:
        """Frees the communicator, if nothing is under way on it. Open MPI numbers what a rank sends to another on one
        communicator, and gives a later one the name of one that is gone: a message that nobody received would be
        counted there, and what comes after it waited for without end."""
        open_mpi = is_open_mpi(self.MPI)
        unreceived = self.carries_messages and open_mpi
        if healthy and not self._gave_up and not unreceived:
            self.comm.Free()
        else:
            given_up.drain(self.comm)
        if not open_mpi:  # which, asked anything, ends this process if a peer has ended: it is asked in later calls
            given_up.collect(self.MPI)


class Buffer:
    """Bytes of our own at a fixed address, a multiple of 64."""

    def __init__(self, nbytes: int) -> None:
        self._owner = (c_char * (nbytes + 64))()
        self.address = (addressof(self._owner) + 63) // 64 * 64
        self.nbytes = nbytes
        start = self.address - addressof(self._owner)
        self.memory = memoryview(self._owner).cast("B")[start : start + nbytes]

    def fill(self, at: int, address: int, nbytes: int) -> None:
        if nbytes:
            memmove(self.address + at, address, nbytes)


class Inbox:
    """Words of ``nbytes`` that come by one tag from any rank. Called by one thread at a time, and by signal handlers
    amid it. They are looked for with matched probes, not with a receive from any rank: if the message has come
    already, such a receive of MPICH 5.0 over UCX takes it in, and never completes."""

    def __init__(self, link: MpiLink, tag: int, nbytes: int) -> None:
        self._link, self._tag, self._word, self._status = link, tag, Buffer(nbytes), link.MPI.Status()
        self._found: list[Found] = []  # what a probe has matched, until it is noted
        self.hearing = False

    def hear(self, note: Callable[[memoryview, int], None]) -> None:
        """``note``: called with each word that has come and the rank it is from; again, where a signal handler raised
        amid it."""
        if self.hearing:
            return
        link = self._link
        try:
            self.hearing = True
            while True:
                if not self._found:
                    found = map(link.comm.Improbe, (link.MPI.ANY_SOURCE,), (self._tag,), (self._status,))
                    self._found.extend(filter(None, found))
                if not self._found:
                    return
                if self._found[0] != link.MPI.MESSAGE_NULL:  # else a signal handler raised after this
                    self._found[0].Recv([self._word.memory, link.MPI.BYTE])
                note(self._word.memory, self._status.Get_source())
                self._found.clear()
        finally:
            self.hearing = False


class BackgroundTransfers:
    """Transfers of one group that no call waits for: what nobody wants is received all the same, so that it is taken
    for nothing else, and short news is sent. True while some are under way."""

    def __init__(self, link: MpiLink) -> None:
        self._link = link
        self._under_way: list[tuple[list[Request], object]] = []

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def begin(self, memory: object) -> list[Request]:
        """A list for requests that use ``memory``, which is kept until they are complete."""
        requests: list[Request] = []
        self._under_way.append((requests, memory))
        return requests

    def adopt(self, requests: list[Request], memory: object) -> None:
        """Sees to the end of requests that are under way, and keeps ``memory`` meanwhile."""
        self._under_way.append((requests, memory))

    def send(self, memory: Buffer, peer: int, tag: int) -> None:
        requests, link = self.begin(memory), self._link
        over_hosts.lib.c10d_transfer_begins()
        requests.extend(map(link.comm.Isend, ([memory.memory, link.MPI.BYTE],), (peer,), (tag,)))

    def discard(self, nbytes: int, source: int, tag: int) -> None:
        """Receives and drops a message that nobody wants."""
        scratch = Buffer(nbytes)
        self._link.receive(scratch.address, nbytes, source, tag, self.begin(scratch))

    def advance(self) -> None:
        for each in list(self._under_way):
            if self._link.MPI.Request.Testall(each[0]) and each in self._under_way:
                self._under_way.remove(each)

    def close(self) -> None:
        for requests, memory in self._under_way:
            if not self._link.MPI.Request.Testall(requests):
                self._link.give_up(requests, memory)
        self._under_way.clear()
