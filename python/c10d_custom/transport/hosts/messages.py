"""Sends and receives between hosts, over MPI.

A message is a head (size, dtype, and the bytes themselves if they are few) and, if they are not, its
data, on a tag of its own. Receives look for heads with matched probes, so that a receive that has timed
out leaves nothing behind in MPI. Matched by (source, tag), in the order of posting; nothing waits for
anything else. Whoever waits for a message drives the engine, otherwise a thread does while there is
anything to do. Those with tags that MPI does not have: early_messages.py. Those that do not fit: refusals.py.

Signal handlers run between any two steps of the main thread, raise there, or call the engine again. So the lock may be
taken twice by one thread; what looks for news changes nothing; `_taking` names the ticket that is being changed, and
who finds its own thread amid that gets an error; and an exception that leaves then ends the group. What MPI returns
goes straight into a list that the ticket holds (extend of a map: no step of Python between), so that no request is
lost.

A receive from any source also looks at what the ranks of this host have sent: `local` is asked for it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import memmove
from threading import get_ident
from typing import TYPE_CHECKING

from ... import native
from ...call import Call, Region
from ...errors import TransportError
from ..message_thread import MessageThread
from ..trouble import Trouble
from .asides import Asides
from .early_messages import EarlyMessages
from .link import Buffer
from .message_ticket import HEAD, SHARED_TAGS, Head, MessageTicket, late_news, receive_head, tags_of, unlike
from .refusals import Refusals

if TYPE_CHECKING:
    from ...call import Message
    from ...errors import UsageError
    from ..base import Ticket
    from ..call_log import CallLog
    from .link import MpiLink

    Wanted = tuple[int, tuple[int, int], MessageTicket]  # peer, MPI's tags, the receive


_EAGER = 16 << 10  # bytes of a message, up to which they follow its head; on one host: kEagerLimit, backend/shm/p2p.cpp
_CHECK = 5e-3  # s between two looks at the group's health
_GRACE = 1.0
_KEPT = 1.0  # s: that what is on its way gets when its group has ended; within it, too, the other side hears of the end


class Messages:
    """``fail(trouble, message, began)`` makes an exception; ``check(peers)`` raises Trouble; ``local(tag)``:
    the rank of this host whose message waits for a receive, or -1; ``post_local(message, rank)``: its ticket; ``log``:
    the CallLog to tell of messages. Weak references: ``abort``, to what ends the group; ``inside``, to what makes the
    UsageError of a call amid another, from its name."""

    def __init__(
        self,
        link: MpiLink,
        complete: Callable[[int], None],
        fail: Callable[[Trouble, Message, float], BaseException],
        check: Callable[[Sequence[int]], None],
        local: Callable[[int], int],
        post_local: Callable[[Message, int], Ticket],
        log: CallLog,
        abort: Callable[[], Callable[[], None] | None],
        inside: Callable[[], Callable[[str], UsageError] | None],
    ) -> None:
        self.link, self.complete = link, complete
        self._fail, self._check, self._local, self._post_local = fail, check, local, post_local
        self._log, self.numbers, self._abort, self._inside = log, itertools.count(1), abort, inside
        self._lock = threading.RLock()
        self._by = 0  # the thread that makes progress
        self._taking: MessageTicket | None = None  # the ticket that it is changing
        self._wanted: list[Wanted] = []  # receives that have found no message, in order of posting
        self._moving: list[MessageTicket] = []  # tickets with requests under way, or a local ticket
        self._asides, self._refusals = Asides(link), Refusals(link)
        self._early = EarlyMessages(link, self._asides)
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
        self.link.carries_messages = True
        ticket, me = MessageTicket(self, message), get_ident()
        tags = tags_of(message.tag, self.link.tag_limit)
        self._log.post(ticket)
        try:
            with self._lock:
                outer, self._by, self._taking = self._by, me, ticket
                try:
                    if message.is_recv:
                        self._wanted.append((message.peer, tags, ticket))
                    else:
                        self._moving.append(ticket)
                        self._send(message, tags, ticket)
                finally:
                    self._by, self._taking = outer, None
            self.progress()
            if not ticket.done() or self._asides:
                self._thread.ensure()
            return ticket
        except BaseException:
            self.withdraw(ticket)
            raise

    def may_have_refusals(self) -> bool:
        """Whether `refusal` may have something to say, as far as a look now and then shows."""
        return self._refusals.any()

    def refused_late(self) -> bool:
        """Whether there is something for `refusal`, as far as is known."""
        return bool(self._refusals.late)

    def refusal(self, call: Call | Message | None) -> BaseException | None:
        """The error of sends that were over when they were refused, for ``call`` to raise (None: a small collective).
        Each is raised once, and none by steps of what is done for tensors of a device."""
        staged = call.memory if isinstance(call, Call) else call is not None and isinstance(call.tensor, Region)
        if staged or not self._refusals.any():
            return None
        self.progress()
        errors = [self._fail(trouble, message, time.monotonic()) for trouble, message in self._refusals.take()]
        if len(errors) < 2:
            return errors[0] if errors else None  # another thread is at it: the next call hears of it
        return type(errors[0])("\n".join(map(str, errors)))

    def refuse_inside(self, name: str) -> None:
        if self._taking is not None and self._by == get_ident() and (inside := self._inside()) is not None:
            raise inside(name)

    def _send(self, message: Message, tags: tuple[int, int], ticket: MessageTicket) -> None:
        t, link = message.tensor, self.link
        try:
            link.before_sending()
        except Trouble as trouble:
            self._drop(ticket)
            return self._end(ticket, trouble)
        eager = t.nbytes <= _EAGER
        head = Buffer(HEAD.size + (t.nbytes if eager else 0))
        HEAD.pack_into(head.memory, 0, t.nbytes, message.dtype.code, eager, message.tag, ticket.number, link.token)
        ticket.keep = head
        if eager:
            head.fill(HEAD.size, t.data_ptr(), t.nbytes)
        else:
            self._refusals.expect()
        ticket.requests.extend(map(link.comm.Isend, ([head.memory, link.MPI.BYTE],), (message.peer,), (tags[0],)))
        if not eager:
            link.pieces(link.comm.Isend, t.data_ptr(), t.nbytes, message.peer, tags[1], ticket.requests)
        ticket.posted = True

    def withdraw(self, ticket: MessageTicket) -> None:
        """See Ticket.withdraw."""
        with self._lock:
            if ticket.done():
                return
            if not ticket.requests and ticket.inner is None:  # nobody knows of it
                self._drop(ticket)
                return self._end(ticket, Trouble(native.ABORTED))
        if ticket.inner is not None:
            ticket.inner.withdraw()
        elif ticket.message.is_recv:
            # All of it is on its way, into the caller's tensor: it is the caller's again when it is here.
            ticket.kept_until = time.monotonic() + _KEPT
            ticket.wait(ticket.deadline - time.monotonic())
        elif ticket.message.tensor.nbytes > _EAGER or not ticket.posted:  # else MPI has the bytes, and delivers them
            # The other may be reading the tensor: until it has, or knows.
            ticket.kept_until = time.monotonic() + _KEPT
            self._end_group()
            while not ticket.done() and time.monotonic() < ticket.kept_until:
                self.progress()
                time.sleep(1e-3)
        with self._lock:
            if not ticket.done() and ticket in self._moving:
                self._drop(ticket)
                self._end(ticket, Trouble(native.ABORTED))

    def _end_group(self) -> None:
        if (abort := self._abort()) is not None:
            abort()

    # --- the engine

    def _live(self) -> bool:
        return bool(self._wanted or self._moving or self._asides)

    def progress(self) -> bool:
        """Does what can be done now, unless another thread is at it. True if something moved."""
        me = get_ident()
        if self._by not in (0, me) or self._taking is not None and self._by == me:
            return False
        broken = None
        with self._lock:
            outer, self._by = self._by, me
            try:
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
            if (amid := self._taking) is not None and not amid.done() and amid not in self._moving:
                self._moving.append(amid)  # fails with the rest
            self._taking = None
        now = time.monotonic()
        if now - self._checked >= _CHECK:
            self._checked = now
            self._look(now)
        return moved

    def _broken(self, ticket: MessageTicket) -> None:
        """A signal handler raised while ``ticket`` was being changed."""
        self._end_group()
        if ticket.matched and ticket.requests:
            ticket.kept_until = time.monotonic() + _KEPT  # its bytes are coming into the caller's tensor
            if ticket not in self._moving:
                self._moving.append(ticket)
        else:
            self._drop(ticket)
            self.link.give_up(ticket.requests, ticket)
            self._end(ticket, Trouble(native.ABORTED))

    def _match(self) -> bool:
        moved, seen = False, set()
        probe, MPI = self.link.comm.Iprobe, self.link.MPI
        for entry in list(self._wanted):
            peer, tags, ticket = entry
            if tags != SHARED_TAGS and ((peer, tags) in seen or (-1, tags) in seen) or entry not in self._wanted:
                continue
            seen.add((peer, tags))
            if peer < 0 and (source := self._local(ticket.message.tag)) >= 0:
                self._taking = ticket
                self._wanted.remove(entry)
                ticket.inner = self._post_local(ticket.message, source)
                self._log.hand_over(ticket)
                self._moving.append(ticket)
                self._taking, moved = None, True
                continue
            if tags == SHARED_TAGS:
                moved |= self._match_shared(entry)
                continue
            if not probe(MPI.ANY_SOURCE if peer < 0 else peer, tags[0]) or entry not in self._wanted:
                continue
            self._taking, status = ticket, MPI.Status()
            found = self.link.comm.Improbe(MPI.ANY_SOURCE if peer < 0 else peer, tags[0], status)
            if found is not None:
                self._deliver(entry, status.Get_source(), *receive_head(self.link, found, status))
                moved = True
            self._taking = None
        return moved

    def _match_shared(self, entry: Wanted) -> bool:
        peer, _, ticket = entry
        while self._early.has_come():
            self._taking = ticket
            self._early.take_in()
            self._taking = None
        kept = self._early.kept
        for early in self._early.of(ticket.message.tag, peer):
            if not self.link.MPI.Request.Testall(early.requests):
                return False
            if early not in kept or entry not in self._wanted:
                continue
            self._taking = ticket
            kept.remove(early)
            self._wanted.remove(entry)
            self._take(ticket, early.source, early.head, early.memory, early.data)
            self._taking = None
            return True
        return False

    def _take(self, ticket: MessageTicket, source: int, head: Head, memory: Buffer, data: Buffer) -> None:
        """All of the message is here."""
        ticket.matched, ticket._source = True, source
        trouble = unlike(ticket, head)
        if trouble is not None and not head.eager:
            self._refusals.refuse(self._asides, head, ticket)
        elif trouble is None and head.nbytes:
            at = data.address + (HEAD.size if data is memory else 0)
            memmove(ticket.message.tensor.data_ptr(), at, head.nbytes)
        self._end(ticket, trouble)

    def _deliver(self, entry: Wanted, source: int, head: Head, memory: Buffer) -> None:
        _, (_, data_tag), ticket = entry
        if head.token != self.link.token:
            return None if head.eager else self._asides.discard(head.nbytes, source, data_tag)
        self._wanted.remove(entry)
        if head.eager:
            return self._take(ticket, source, head, memory, memory)
        ticket.matched, ticket._source = True, source
        if (trouble := unlike(ticket, head)) is not None:
            self._refusals.refuse(self._asides, head, ticket)  # before its data are asked for: see there
            self._asides.discard(head.nbytes, source, data_tag)  # must not be taken for another message
            self._end(ticket, trouble)
        else:
            self.link.receive(ticket.message.tensor.data_ptr(), head.nbytes, source, data_tag, ticket.requests)
            self._moving.append(ticket)
        return None

    def _advance(self) -> bool:
        moved = False
        test = self.link.MPI.Request.Testall
        for ticket in list(self._moving):
            inner = ticket.inner
            if not (inner.done() if inner is not None else test(ticket.requests)) or ticket not in self._moving:
                continue
            self._taking = ticket
            if inner is None and not ticket.message.is_recv and ticket.message.tensor.nbytes > _EAGER:
                self._refusals.hear(self._moving, now=True)
            self._moving.remove(ticket)
            if inner is not None:
                ticket._source = inner.source
                ticket.finish(inner.error(), ticket._source)
            else:
                self._end(ticket, late_news(ticket, self._check))
            self._taking, moved = None, True
        self._refusals.hear(self._moving)
        self._asides.advance()
        return moved

    def _end(self, ticket: MessageTicket, trouble: Trouble | None = None) -> None:
        self._log.finish(ticket, native.OK if trouble is None else trouble.status)
        error = None if trouble is None else self._fail(trouble, ticket.message, ticket.began)
        ticket.finish(error, ticket._source)

    def _look(self, now: float) -> None:
        for ticket in [e[2] for e in self._wanted] + list(self._moving):
            if ticket.inner is not None:
                continue
            peer = ticket._source if ticket.matched else ticket.message.peer
            trouble = Trouble(native.TIMEOUT, peer) if now >= ticket.deadline else None
            if trouble is None:
                try:
                    self._check([peer] if peer >= 0 else [])
                except Trouble as found:
                    trouble = found
                    if now < ticket.kept_until and not (found.status == native.PEER_LOST and found.peer == peer):
                        continue
            if ticket.done():
                continue
            self._taking = ticket
            if trouble is not None:
                self._drop(ticket)
                self._end(ticket, trouble)
            elif self._failed is not None and now - self._failed[0] > _GRACE:
                self._drop(ticket)
                self._log.finish(ticket, native.ABORTED)
                ticket.finish(TransportError(f"{ticket.message.name}: MPI: {self._failed[1]}"))
            self._taking = None

    def _drop(self, ticket: MessageTicket) -> None:
        for entry in list(self._wanted):
            if entry[2] is ticket:
                self._wanted.remove(entry)
        if ticket in self._moving:
            self._moving.remove(ticket)
            if ticket.message.is_recv:
                for request in ticket.requests:
                    request.Cancel()  # what has not begun to come shall not come into the caller's tensor
            self.link.give_up(ticket.requests, ticket)

    def close(self) -> None:
        """Fails what is under way, and ends the thread. Called amid a pass of this thread's own, that fails it when it
        returns."""
        self._over = True
        self._thread.end()
        with self._lock:
            if self._taking is None:
                self._fail_all()
            for each in (self._asides, self._early):
                each.close()
        self._thread.join(5.0)

    def _fail_all(self) -> None:
        for ticket in [e[2] for e in self._wanted] + list(self._moving):
            self._drop(ticket)
            self._end(ticket, Trouble(native.ABORTED))
