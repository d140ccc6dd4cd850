"""Sends and receives between hosts, over MPI.

A message is a header (size, dtype, and the bytes themselves if they are few) and, if they are not, its
data, on a tag of its own. Receives look for headers with matched probes, so that a receive that has timed
out leaves nothing behind in MPI. Matched by (source, tag), in the order of posting; nothing waits for
anything else. Whoever waits for a message drives the engine, otherwise a thread does while there is
anything to do. Those with tags that MPI does not have: message_ticket.py. Those that do not fit: refusals.py. Short
ones that nobody receives: room.py. What is done for each pass and look does not grow with the number of receives that
wait for the same.

Signal handlers run between any two steps of the main thread, raise there, or call the engine again. So the lock may be
taken twice by one thread; what looks for news changes nothing; `_taking` names the ticket that is being changed, and
who finds its own thread amid that gets an error; and an exception that leaves then ends the group. What MPI returns
goes straight into a list that the ticket holds (extend of a map: no step of Python between), so that no request is
lost.

A receive from any source also looks at what the ranks of this host have sent: `local` is asked for it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import TYPE_CHECKING, NamedTuple

from ... import native
from ...call import Call, Region
from ...errors import TransportError
from ...native import over_hosts
from ...native.direct import without_functions
from ...threads import OVER_MPI, rest, threading, time, wait_until
from ..message_thread import MessageThread
from ..trouble import Trouble
from .link import BackgroundTransfers, Buffer
from .message_ticket import (
    AFTERWARDS,
    HEADER,
    SHARED_TAGS,
    TO_ASK_FOR,
    WHOLE,
    EarlyMessages,
    MessageHeader,
    MessageTicket,
    Wanted,
    late_news,
    receive_header,
    tags_of,
    unlike,
)
from .refusals import Refusals
from .room import Room

if TYPE_CHECKING:
    from ...call import Message
    from ...errors import UsageError
    from .. import Ticket
    from ..call_log import CallLog
    from .link import MpiLink


_EAGER = 16 << 10  # bytes of a message that follow its header, at most; on one host: kEagerLimit, backend/shm/p2p.cpp
_AT_ONCE = 64  # messages of one kind that a pass takes in before it looks for others
_CHECK = 5e-3  # s between two looks at the group's health
_GRACE = 1.0
_KEPT = 1.0  # s: that what is on its way gets when its group has ended; within it, too, the other side hears of the end


class _Posted(MessageTicket):
    """A ticket whose waiter drives the engine meanwhile."""

    def __init__(self, engine: Messages, message: Message) -> None:
        super().__init__(message, next(engine.numbers), engine.complete)
        self.engine = engine

    def want(self) -> None:
        if self.since is None:
            self.engine.want(self)

    def withdraw(self) -> None:
        self.engine.withdraw(self)

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        begun, waited = time.monotonic(), 0.0
        self.want()
        while not self._done:
            self.engine.refuse_inside(self.message.name)
            if begun + waited >= self.deadline:
                self.engine.look_soon()
            self.engine.progress()
            waited = time.monotonic() - begun
            if self._done or waited >= seconds:
                break
            if self.engine.refusals.late and self.message.is_recv and not self.begun():
                # What it waits for may be the answer of who has refused.
                if (error := self.engine.refusal(self.message)) is not None:
                    raise error
            self.engine.serve_this_host()
            rest(OVER_MPI, waited)
        return self._done


class Surroundings(NamedTuple):
    """What Messages asks of the group that they are of. ``fail(trouble, message, since)`` makes an exception, of what
    lasts since then; ``check(peers)`` raises Trouble, ``check_quickly()`` by what is known already; ``local(tag)``: the
    rank of this host whose message waits for a receive, or -1; ``post_local(message, rank)``: its ticket; ``log``: the
    CallLog to tell of messages. Weak references: ``abort``, to what ends the group; ``inside``, to what makes the
    UsageError of a call amid another, from its name."""

    fail: Callable[[Trouble, Message, float], BaseException]
    check: Callable[[Sequence[int]], None]
    check_quickly: Callable[[], None]
    local: Callable[[int], int]
    post_local: Callable[[Message, int], Ticket]
    log: CallLog
    abort: Callable[[], Callable[[], None] | None]
    inside: Callable[[], Callable[[str], UsageError] | None]


class Messages:
    """All messages of one group that go between hosts; ``complete``: see PyTicket."""

    def __init__(self, link: MpiLink, complete: Callable[[int], None], around: Surroundings) -> None:
        self.link, self.complete, self.numbers = link, complete, itertools.count(1)
        self._fail, self._check, self._check_quickly = around.fail, around.check, around.check_quickly
        self._local, self._post_local, self._log = around.local, around.post_local, around.log
        self._abort, self._inside = around.abort, around.inside
        self._lock = threading.RLock()
        self._by = 0  # the thread that makes progress
        self._taking: MessageTicket | None = None  # the ticket that it is changing
        self._wanted = Wanted()
        self._moving: dict[MessageTicket, None] = {}  # with requests under way, or a local ticket
        self._background, self.refusals, self._early = BackgroundTransfers(link), Refusals(link), EarlyMessages(link)
        self._room = Room(link, self._background, _EAGER)
        self._sends: dict[int, MessageTicket] = {}  # those under way, by number
        self._peers = Counter[int]()  # how many are under way with each rank; -1: receives from any
        self._due = math.inf  # none ends sooner by its deadline
        self._checked = 0.0
        self._failed: tuple[float, Exception] | None = None  # of MPI, and when; who is lost may be known later
        self._thread = MessageThread(self.progress, self._live)
        self._over = False

    def post(self, message: Message) -> MessageTicket:
        self.refuse_inside(message.name)
        if self._over:
            raise self._fail(Trouble(native.ABORTED), message, time.monotonic())
        if (error := self.refusal(message)) is not None:
            raise error
        try:
            self._check_quickly()  # as inside a host: none is begun once it is known
        except Trouble as trouble:
            raise self._fail(trouble, message, time.monotonic()) from None
        self.link.carries_messages = True
        ticket, me = _Posted(self, message), threading.get_ident()
        tags = tags_of(message.tag, self.link.tag_limit)
        self._log.post(ticket)
        try:
            with self._lock:
                outer, self._by, self._taking = self._by, me, ticket
                try:
                    self._peers[message.peer] += 1
                    ticket.counted = True
                    if message.is_recv:
                        self._wanted.add(ticket)
                    else:
                        self._moving[ticket] = None
                        self._sends[ticket.number] = ticket
                        self._send(message, tags, ticket)
                finally:
                    self._by, self._taking = outer, None
            self.progress()
            if not ticket.done() or self._background:
                self._thread.ensure()
            return ticket
        except BaseException:
            self.withdraw(ticket)
            raise

    def refusal(self, call: Call | Message | None) -> BaseException | None:
        """The error of sends that had been reported as done when they were refused, for ``call`` to raise (None: a
        small collective). Each is raised once, by a call of the program: not by one that serves CUDA tensors."""
        staged = call.memory if isinstance(call, Call) else call is not None and isinstance(call.tensor, Region)
        if staged or not self.refusals.any():
            return None
        self.progress()
        errors = [self._fail(trouble, message, time.monotonic()) for trouble, message in self.refusals.take()]
        if len(errors) < 2:
            return errors[0] if errors else None  # another thread is at it: the next call hears of it
        return type(errors[0])("\n".join(map(str, errors)))

    def refuse_inside(self, name: str) -> None:
        if self._taking is not None and self._by == threading.get_ident() and (inside := self._inside()) is not None:
            raise inside(name)

    def _send(self, message: Message, tags: tuple[int, int], ticket: MessageTicket) -> None:
        t, link = message.tensor, self.link
        try:
            link.before_sending()
        except Trouble as trouble:
            self._drop(ticket)
            return self._end(ticket, trouble)
        short = t.nbytes <= _EAGER
        if short and self._room.take(message.peer, t.nbytes):
            way = WHOLE
        else:
            way = TO_ASK_FOR if short or tags == SHARED_TAGS else AFTERWARDS
            self.refusals.expect()
        header = Buffer(HEADER.size + (t.nbytes if way == WHOLE else 0))
        HEADER.pack_into(header.memory, 0, t.nbytes, message.dtype.code, way, message.tag, ticket.number, link.token)
        ticket.keep = header
        if way == WHOLE:
            header.fill(HEADER.size, t.data_ptr(), t.nbytes)
        ticket.requests.extend(map(link.comm.Isend, ([header.memory, link.MPI.BYTE],), (message.peer,), (tags[0],)))
        if way == TO_ASK_FOR:
            self._room.offer(ticket)
            self._moving.pop(ticket, None)
            return None
        if way == AFTERWARDS:
            link.pieces(link.comm.Isend, t.data_ptr(), t.nbytes, message.peer, tags[1], ticket.requests)
        ticket.posted = True
        return None

    def want(self, ticket: MessageTicket) -> None:
        """See Ticket.want."""
        with self._lock:
            if ticket.since is None:
                ticket.since = time.monotonic()
                ticket.deadline = ticket.since + ticket.message.timeout
                self._due = min(self._due, ticket.deadline)
                if ticket.inner is not None:
                    ticket.inner.want()

    def look_soon(self) -> None:
        """Has the next pass look at deadlines: the time of a message that is waited for is over."""
        self._due = 0.0

    def withdraw(self, ticket: MessageTicket) -> None:
        """See Ticket.withdraw."""
        with self._lock:
            if ticket.done():
                return
            # Nobody knows of it, or it is as good as on its way.
            if not ticket.begun() or self._room.offers(ticket) and ticket.message.tensor.nbytes <= _EAGER:
                self._drop(ticket)
                return self._end(ticket, Trouble(native.INTERRUPTED))
        if ticket.inner is not None:
            ticket.inner.withdraw()
        elif ticket.message.is_recv:
            # The message is on its way, into the caller's tensor, which is free once it has come.
            ticket.kept_until = time.monotonic() + _KEPT
            ticket.wait(ticket.deadline - time.monotonic())
        elif ticket.message.tensor.nbytes > _EAGER or not ticket.posted:  # else MPI has the bytes, and delivers them
            # The other may be reading the tensor: until it has, or knows.
            ticket.kept_until = time.monotonic() + _KEPT
            self._end_group()

            def over() -> bool:
                self.progress()
                return ticket.done()

            wait_until(over, OVER_MPI, _KEPT)
        with self._lock:
            if not ticket.done() and (ticket in self._moving or self._room.offers(ticket)):
                self._drop(ticket)
                self._end(ticket, Trouble(native.ABORTED))

    def serve_this_host(self) -> None:
        """Takes in what this host's ranks send: they may wait for that while this one waits, and others for them."""
        self._local(0)

    def _end_group(self) -> None:
        if (abort := self._abort()) is not None:
            abort()

    # --- the engine

    def _live(self) -> bool:
        return bool(self._wanted or self._moving or self._background or self._room)

    def _under_way(self) -> list[MessageTicket]:
        return self._wanted.tickets() + list(self._moving) + self._room.tickets()

    def progress(self) -> bool:
        """Does what can be done now, unless another thread is at it. True if something moved."""
        me = threading.get_ident()
        if self._by not in (0, me) or self._taking is not None and self._by == me:
            return False
        broken = None
        with self._lock:
            outer, self._by = self._by, me
            try:
                with without_functions():  # a waiting thread's may be on
                    moved = self._pass()
            except BaseException:
                broken, self._taking = self._taking, None
                if broken is None:
                    raise
                self._broken(broken)
                raise
            finally:
                self._by = outer
                if self._over:
                    self._fail_all()
        return moved

    def _pass(self) -> bool:
        moved = False
        try:
            if self._failed is None:
                moved = self._match() | self._advance()
        except self.link.MPI.Exception as error:
            self._failed = time.monotonic(), error
            if (amid := self._taking) is not None and not amid.done() and not self._room.offers(amid):
                self._moving[amid] = None  # fails with the rest
            self._taking = None
        now = time.monotonic()
        if now - self._checked >= _CHECK:
            self._checked = now
            over_hosts.lib.c10d_mpi_is_called()
            self._look(now)
        return moved

    def _broken(self, ticket: MessageTicket) -> None:
        """A signal handler raised while ``ticket`` was being changed."""
        self._end_group()
        if ticket.matched and ticket.requests:
            ticket.kept_until = time.monotonic() + _KEPT  # its bytes are coming into the caller's tensor
            self._moving[ticket] = None
        else:
            self._drop(ticket)
            self.link.give_up(ticket.requests, ticket)
            self._end(ticket, Trouble(native.ABORTED))

    def _match(self) -> bool:
        moved, kinds = False, self._wanted.kinds()
        from_any = {tag for peer, tag in kinds if peer < 0}
        for peer, tag in kinds:
            shared = tags_of(tag, self.link.tag_limit) == SHARED_TAGS
            # Where receives from one rank and from any take turns, so do their kinds.
            for _ in range(1 if tag in from_any else _AT_ONCE):
                ticket = self._wanted.first((peer, tag))
                if ticket is None or not (self._match_shared(ticket) if shared else self._match_one(ticket)):
                    break
                moved = True
        return moved

    def _is_for(self, ticket: MessageTicket, source: int) -> bool:
        """Whether no older receive than ``ticket`` waits for what comes from there."""
        kinds = [(source, ticket.message.tag), (-1, ticket.message.tag)]
        older = [first for kind in kinds if (first := self._wanted.first(kind)) is not None]
        return all(ticket.number <= first.number for first in older)

    def _match_one(self, ticket: MessageTicket) -> bool:
        peer, tag = ticket.message.peer, ticket.message.tag
        if peer < 0 and self._match_local(ticket):
            return True
        link, (head_tag, data_tag), status = self.link, tags_of(tag, self.link.tag_limit), self.link.MPI.Status()
        if not link.comm.Iprobe(link.MPI.ANY_SOURCE if peer < 0 else peer, head_tag, status):
            return False
        source = status.Get_source()
        if ticket not in self._wanted or not self._is_for(ticket, source):
            return False
        self._taking = ticket
        found = link.comm.Improbe(source, head_tag, status)
        if found is not None:
            self._met(ticket, source, *receive_header(link, found, status), data_tag)
        self._taking = None
        return found is not None

    def _match_local(self, ticket: MessageTicket) -> bool:
        if (source := self._local(ticket.message.tag)) < 0:
            return False
        self._taking = ticket
        self._wanted.remove(ticket)
        ticket.inner = self._post_local(ticket.message, source)
        if ticket.since is not None:
            ticket.inner.want()
        self._log.hand_over(ticket)
        self._uncount(ticket)
        self._moving[ticket] = None
        self._taking = None
        return True

    def _match_shared(self, ticket: MessageTicket) -> bool:
        if ticket.message.peer < 0 and self._match_local(ticket):
            return True
        while self._early.has_come():
            self._taking = ticket
            self._early.take_in()
            self._taking = None
        if ticket not in self._wanted:
            return True
        self._taking = ticket
        early = self._early.take(ticket.message.tag, ticket.message.peer, lambda source: self._is_for(ticket, source))
        if early is not None:
            self._met(ticket, early.source, early.header, early.memory, SHARED_TAGS[1])
        self._taking = None
        return early is not None

    def _met(self, ticket: MessageTicket, source: int, header: MessageHeader, memory: Buffer, data_tag: int) -> None:
        """``ticket``, the oldest receive that waits for it, has met a message. ``memory`` holds its header and, where
        the message came whole, its bytes."""
        link = self.link
        if header.token != link.token:
            return self._background.discard(header.nbytes, source, data_tag) if header.way == AFTERWARDS else None
        self._wanted.remove(ticket)
        ticket.matched, ticket._source = True, source
        trouble = unlike(ticket, header)
        if trouble is not None and header.way != WHOLE:
            self.refusals.refuse(self._background, header, ticket)  # before its data are asked for: see there
        if header.way == WHOLE:
            if trouble is None and header.nbytes:
                memmove(ticket.message.tensor.data_ptr(), memory.address + HEADER.size, header.nbytes)
            self._room.received(source, header.nbytes)
        elif trouble is None:
            if header.way == TO_ASK_FOR:
                self._room.ask(source, header, ticket)
            else:
                link.receive(ticket.message.tensor.data_ptr(), header.nbytes, source, data_tag, ticket.requests)
            self._moving[ticket] = None
            return None
        elif header.way == AFTERWARDS:
            self._background.discard(header.nbytes, source, data_tag)  # must not be taken for another message
        self._end(ticket, trouble)
        return None

    def _advance(self) -> bool:
        moved = False
        test = self.link.MPI.Request.Testall
        if self._room:
            self._room.hear()
            while self._room.granted:
                self._moving[self._room.granted[0]] = None
                self._room.granted.pop(0)
        for ticket in list(self._moving):
            inner, requests = ticket.inner, ticket.requests if ticket.asked is None else ticket.asked
            if not (inner.done() if inner is not None else test(requests)) or ticket not in self._moving:
                continue
            self._taking = ticket
            if inner is None and not ticket.message.is_recv and ticket.message.tensor.nbytes > _EAGER:
                self._hear_refusals(now=True)
            self._moving.pop(ticket, None)
            if inner is not None:
                ticket._source = inner.source
                ticket.finish(inner.error(), ticket._source)
            else:
                if ticket.asked is not None and ticket.keep is not None and ticket.message.tensor.nbytes:
                    memmove(ticket.message.tensor.data_ptr(), ticket.keep.address, ticket.message.tensor.nbytes)
                self._end(ticket, late_news(ticket, self._check))
            self._taking, moved = None, True
        self._hear_refusals()
        self._background.advance()
        return moved

    def _hear_refusals(self, now: bool = False) -> None:
        self.refusals.hear(self._sends, now)
        while self.refusals.met:
            ticket = self.refusals.met[0]
            if self._room.offers(ticket):
                self._moving[ticket] = None  # its end is to come
                self._room.take_back(ticket)
            self.refusals.met.pop(0)

    def _end(self, ticket: MessageTicket, trouble: Trouble | None = None) -> None:
        self._uncount(ticket)
        self._log.finish(ticket, native.OK if trouble is None else trouble.status)
        error = (
            None
            if trouble is None
            else self._fail(trouble, ticket.message, ticket.began if ticket.since is None else ticket.since)
        )
        ticket.finish(error, ticket._source)

    def _uncount(self, ticket: MessageTicket) -> None:
        """Counts a ticket no longer among those that wait for its peer."""
        if ticket.counted:
            ticket.counted = False
            self._peers[ticket.message.peer] -= 1
        self._sends.pop(ticket.number, None)

    def _trouble_with(self, peer: int) -> Trouble | None:
        """Returns why nothing is to be expected of a rank (-1: of any)."""
        try:
            self._check([peer] if peer >= 0 else [])
        except Trouble as trouble:
            return trouble
        return None

    def _all_well(self) -> bool:
        """Whether nothing is to be said to any that is under way. One look for each rank, however many wait for it."""
        awaited = [peer for peer, count in self._peers.items() if count]
        if -1 in awaited:
            awaited = list(range(self.link.size))
        try:
            self._check(awaited)
        except Trouble:
            return False
        return True

    def _look(self, now: float) -> None:
        if now < self._due and self._failed is None and self._all_well():
            return
        seen = dict[int, Trouble | None]()
        self._due = math.inf  # first: what a signal handler waits for meanwhile counts
        for ticket in self._under_way():
            if ticket.inner is not None:
                continue
            peer = ticket._source if ticket.matched else ticket.message.peer
            trouble = Trouble(native.TIMEOUT, peer) if now >= ticket.deadline else None
            self._due = min(self._due, ticket.deadline)
            if trouble is None:
                if peer not in seen:
                    seen[peer] = self._trouble_with(peer)
                trouble = seen[peer]
                if trouble is not None and now < ticket.kept_until:
                    if not (trouble.status == native.PEER_LOST and trouble.peer == peer):
                        continue
            if ticket.done():
                continue
            self._taking = ticket
            if trouble is not None:
                self._drop(ticket)
                self._end(ticket, trouble)
            elif self._failed is not None and now - self._failed[0] > _GRACE:
                self._drop(ticket)
                self._uncount(ticket)
                self._log.finish(ticket, native.ABORTED)
                ticket.finish(TransportError(f"{ticket.message.name}: MPI: {self._failed[1]}"))
            self._taking = None

    def _drop(self, ticket: MessageTicket) -> None:
        self._wanted.remove(ticket)
        offered = self._room.offers(ticket)
        if offered:
            self._room.leave_behind(ticket)
        if offered or ticket in self._moving:
            self._moving.pop(ticket, None)
            if ticket.message.is_recv:
                for request in ticket.requests:
                    request.Cancel()  # what has not begun to come shall not come into the caller's tensor
            self.link.give_up(ticket.requests, ticket)

    def close(self) -> None:
        """Fails what is under way, and ends the thread. If this thread is in the middle of a pass (a signal handler
        called it), what is under way is failed by that pass, when it ends."""
        self._over = True
        self._thread.end()
        with self._lock:
            if self._taking is None:
                self._fail_all()
            for each in (self._room, self._background, self._early):
                each.close()
        self._thread.join(5.0)

    def _fail_all(self) -> None:
        for ticket in self._under_way():
            self._drop(ticket)
            self._end(ticket, Trouble(native.ABORTED))
