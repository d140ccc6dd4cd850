"""Sends and receives between hosts, over MPI.

A message is a head (size, dtype, and the bytes themselves if they are few) and, if they are not, its
data, on a tag of its own. Receives look for heads with matched probes, so that a receive that has timed
out leaves nothing behind in MPI. Matched by (source, tag), in the order of posting; nothing waits for
anything else. Whoever waits for a message drives the engine, otherwise a thread does while there is
anything to do.

Tags beyond those of MPI (MPICH's end at 2^29) share one, and their messages are told apart by their
heads; what comes before its receive is taken in and kept.

A receive from any source also looks at what the ranks of this host have sent: `local` is asked for it.
"""
import itertools
import struct
import threading
import time
from ctypes import memmove

from ..errors import TransportError
from . import native
from .failure import Trouble
from .mpi import LARGE_TAGS, POINT_TO_POINT, Buffer
from .tickets import PyTicket

_HEAD = struct.Struct("<QIIq40x")  # bytes, dtype, whether they follow in the head, tag
_SHARED = LARGE_TAGS, LARGE_TAGS + 1
_EAGER = 16 << 10
_CHECK = 5e-3
_LINGER = 0.05
_GRACE = 1.0


class MessageTicket(PyTicket):
    def __init__(self, engine, message):
        super().__init__(engine.complete)
        self.engine, self.message = engine, message
        self.began = time.monotonic()
        self.deadline = self.began + message.timeout
        self.number = next(engine.numbers)
        self.requests, self.keep = [], None
        self.matched = False
        self.inner = None   # the local ticket that a receive from any source has become

    def withdraw(self):
        self.engine.withdraw(self)

    def wait(self, seconds, may_run=False):
        begun = time.monotonic()
        while not self._done:
            self.engine.progress()
            waited = time.monotonic() - begun
            if self._done or waited >= seconds:
                break
            self.engine.link.pause(waited)
        return self._done


class Messages:
    """``fail(trouble, message, began)`` makes an exception; ``check(peers)`` raises Trouble; ``local(tag)``:
    the rank of this host whose message waits for a receive, or -1; ``post_local(message)``: its ticket; ``log``: the
    CallLog to tell of messages; ``abort()`` ends the group."""

    def __init__(self, link, complete, fail, check, local, post_local, log, abort):
        self.link, self.complete = link, complete
        self._fail, self._check, self._local, self._post_local = fail, check, local, post_local
        self._log, self.numbers, self._abort = log, itertools.count(1), abort
        self._lock = threading.Lock()
        self._wanted = []      # receives that have found no message, in order of posting
        self._moving = []      # tickets with requests under way, or a local ticket
        self._drains = []
        self._early = []       # (source, tag, head, requests of its data, buffer) of tags that share one
        self._checked = 0.0
        self._failed = None    # (when, error) of MPI; who is lost may be known a moment later
        self._work = threading.Condition(threading.Lock())
        self._thread = None
        self._idle = False
        self._over = False

    def post(self, message):
        ticket = MessageTicket(self, message)
        tags = self._tags(message.tag)
        self._log.post(ticket)
        try:
            with self._lock:
                if message.is_recv:
                    self._wanted.append((message.peer, tags, ticket))
                else:
                    self._moving.append(ticket)
                    self._send(message, tags, ticket)
            self.progress()
            if not ticket.done():
                self._ensure_thread()
            return ticket
        except BaseException:
            self.withdraw(ticket)
            raise

    def _tags(self, tag):
        at = POINT_TO_POINT + (4 * tag if tag >= 0 else 4 * (-1 - tag) + 2)
        return (at, at + 1) if at + 1 <= self.link.tag_limit else _SHARED

    def _send(self, message, tags, ticket):
        t, link = message.tensor, self.link
        eager = t.nbytes <= _EAGER
        head = Buffer(_HEAD.size + (t.nbytes if eager else 0))
        _HEAD.pack_into(head.memory, 0, t.nbytes, message.dtype.code, eager, message.tag)
        ticket.keep = head
        if eager:
            head.fill(_HEAD.size, t.data_ptr(), t.nbytes)
        ticket.requests = [link.comm.Isend([head.memory, link.MPI.BYTE], message.peer, tags[0])]
        if not eager:
            ticket.requests += link.send(t.data_ptr(), t.nbytes, message.peer, tags[1])

    def withdraw(self, ticket):
        """See Ticket.withdraw."""
        with self._lock:
            if ticket.done():
                return
            inner, waits = ticket.inner, ticket not in self._moving
            if waits:
                self._drop(ticket)
                self._end(ticket, Trouble(native.ABORTED))
        if waits:
            return
        if inner is not None:
            inner.withdraw()
        elif ticket.message.is_recv:
            # All of it is on its way, into the caller's tensor: it is the caller's again when it is here.
            ticket.wait(ticket.deadline - time.monotonic())
        elif ticket.message.tensor.nbytes > _EAGER:     # else MPI has the bytes, and delivers them
            if (abort := self._abort()) is not None:
                abort()
        with self._lock:
            if not ticket.done() and ticket in self._moving:
                self._drop(ticket)
                self._end(ticket, Trouble(native.ABORTED))

    # --- the engine

    def progress(self):
        """Does what can be done now, unless another thread is at it. True if something moved."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            moved = False
            try:
                if self._failed is None:
                    moved = self._match() | self._advance()
            except self.link.MPI.Exception as error:
                self._failed = time.monotonic(), error
            now = time.monotonic()
            if now - self._checked >= _CHECK:
                self._checked = now
                self._look(now)
            return moved
        finally:
            self._lock.release()

    def _match(self):
        moved, seen = False, set()
        for entry in list(self._wanted):
            peer, tags, ticket = entry
            if tags != _SHARED and ((peer, tags) in seen or (-1, tags) in seen):
                continue
            seen.add((peer, tags))
            MPI = self.link.MPI
            if peer < 0 and (source := self._local(ticket.message.tag)) >= 0:
                self._wanted.remove(entry)
                ticket.inner = self._post_local(ticket.message, source)
                self._log.hand_over(ticket)
                self._moving.append(ticket)
                moved = True
                continue
            if tags == _SHARED:
                moved |= self._match_shared(entry)
                continue
            status = MPI.Status()
            found = self.link.comm.Improbe(MPI.ANY_SOURCE if peer < 0 else peer, tags[0], status)
            if found is None:
                continue
            self._wanted.remove(entry)
            moved = True
            self._deliver(ticket, found, status, tags)
        return moved

    def _match_shared(self, entry):
        peer, tags, ticket = entry
        MPI = self.link.MPI
        status = MPI.Status()
        while (found := self.link.comm.Improbe(MPI.ANY_SOURCE, tags[0], status)) is not None:
            source, head = status.Get_source(), self._head(found, status)
            nbytes, _, eager, tag = _HEAD.unpack_from(head.memory)
            data = head if eager else Buffer(nbytes)
            requests = [] if eager else self.link.receive(data.address, nbytes, source, tags[1])
            self._early.append((source, tag, head, requests, data))
        for early in self._early:
            source, tag, head, requests, data = early
            if tag != ticket.message.tag or peer not in (-1, source):
                continue
            if not MPI.Request.Testall(requests):
                return False
            self._early.remove(early)
            self._wanted.remove(entry)
            self._take(ticket, source, head, data)
            return True
        return False

    def _take(self, ticket, source, head, data):
        """All of the message is here."""
        t, at = ticket.message.tensor, _HEAD.size if data is head else 0
        nbytes, dtype, _, _ = _HEAD.unpack_from(head.memory)
        ticket.matched, ticket._source = True, source
        trouble = self._unlike(ticket, nbytes, dtype)
        if trouble is None and nbytes:
            memmove(t.data_ptr(), data.address + at, nbytes)
        self._end(ticket, trouble)

    def _head(self, found, status):
        head = Buffer(max(_HEAD.size, status.Get_count(self.link.MPI.BYTE)))
        found.Recv([head.memory, self.link.MPI.BYTE])
        return head

    @staticmethod
    def _unlike(ticket, nbytes, dtype):
        message = ticket.message
        if nbytes == message.tensor.nbytes and dtype == message.dtype.code:
            return None
        return Trouble(native.MISMATCH, ticket._source, expected=message.tensor.nbytes, actual=nbytes,
                       expected_dtype=message.dtype.code, actual_dtype=dtype)

    def _deliver(self, ticket, found, status, tags):
        source, t = status.Get_source(), ticket.message.tensor
        head = self._head(found, status)
        nbytes, dtype, eager, _ = _HEAD.unpack_from(head.memory)
        if eager:
            return self._take(ticket, source, head, head)
        ticket.matched, ticket._source = True, source
        if (trouble := self._unlike(ticket, nbytes, dtype)) is not None:
            scratch = Buffer(nbytes)  # what follows must not be taken for another message
            self._drains.append((self.link.receive(scratch.address, nbytes, source, tags[1]), scratch))
            self._end(ticket, trouble)
        else:
            ticket.requests = self.link.receive(t.data_ptr(), nbytes, source, tags[1])
            self._moving.append(ticket)

    def _advance(self):
        moved = False
        test = self.link.MPI.Request.Testall
        for ticket in list(self._moving):
            if ticket.inner is not None:
                if not ticket.inner.done():
                    continue
                self._moving.remove(ticket)
                ticket._source = ticket.inner.source
                ticket.finish(ticket.inner.error(), ticket._source)
                moved = True
            elif test(ticket.requests):
                self._moving.remove(ticket)
                self._end(ticket)
                moved = True
        self._drains = [d for d in self._drains if not test(d[0])]
        return moved

    def _end(self, ticket, trouble=None):
        self._log.finish(ticket, native.OK if trouble is None else trouble.status)
        error = None if trouble is None else self._fail(trouble, ticket.message, ticket.began)
        ticket.finish(error, ticket._source)

    def _look(self, now):
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
            if trouble is not None:
                self._drop(ticket)
                self._end(ticket, trouble)
            elif self._failed is not None and now - self._failed[0] > _GRACE:
                self._drop(ticket)
                self._log.finish(ticket, native.ABORTED)
                ticket.finish(TransportError(f"{ticket.message.name}: MPI: {self._failed[1]}"))

    def _drop(self, ticket):
        self._wanted = [e for e in self._wanted if e[2] is not ticket]
        if ticket in self._moving:
            self._moving.remove(ticket)
            self.link.give_up(ticket.requests, ticket)

    # --- the thread

    def _ensure_thread(self):
        with self._work:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="c10d_custom:messages", daemon=True)
                self._thread.start()
            elif self._idle:
                self._work.notify_all()

    def _run(self):
        last = time.monotonic()
        while True:
            moved = self.progress()
            now = time.monotonic()
            live = self._wanted or self._moving or self._drains
            if moved or live:
                last = now if moved else last
                time.sleep(100e-6 if now - last < _LINGER else 1e-3)
                continue
            with self._work:
                if self._over:
                    return
                self._idle = True
                self._work.wait_for(lambda: self._over or self._wanted or self._moving)
                self._idle = False
                last = time.monotonic()

    def close(self):
        """Fails what is under way, and ends the thread."""
        with self._lock:
            for ticket in [e[2] for e in self._wanted] + list(self._moving):
                self._drop(ticket)
                self._end(ticket, Trouble(native.ABORTED))
        with self._work:
            self._over = True
            self._work.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
