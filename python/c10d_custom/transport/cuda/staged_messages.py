"""Messages of CUDA tensors through pinned host memory and a transport of CPU tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...call import Region, changed
from ...errors import AbortedError
from ...threads import threading, time
from ..message_thread import MessageThread
from ..tickets import PyTicket

if TYPE_CHECKING:
    from ...call import Message
    from ...errors import CustomBackendError
    from .. import Ticket, Transport
    from .driver import Driver
    from .pinned import Pinned
    from .stream_op import StreamOp


_LOOK = 0.02


class StagedTicket(PyTicket):
    """A message. A send is done when its bytes have left the pinned memory, a receive when they are on
    their way to the GPU."""

    def __init__(self, messages: StagedMessages, message: Message, address: int) -> None:
        super().__init__(messages.complete)
        self.messages, self.message, self.address = messages, message, address
        stream_op: Any = message.stream_op
        self.stream_op: StreamOp = stream_op
        self.deadline = math.inf  # until it is first waited for
        self.inner: Ticket | None = None  # the CPU transport's ticket

    def want(self) -> None:
        if self.deadline == math.inf:
            self.stream_op.began = time.monotonic()
            self.deadline = self.stream_op.began + self.message.timeout
            if self.inner is not None:
                self.inner.want()

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        until = time.monotonic() + seconds
        self.want()
        while not self._done:
            self.messages.progress()
            left = until - time.monotonic()
            if self._done or left <= 0:
                break
            if self.inner is not None:
                self.inner.wait(min(left, 1e-3))
            else:
                time.sleep(min(left, 50e-6))
        return self._done

    def withdraw(self) -> None:
        if self.inner is not None:
            self.inner.withdraw()
        else:
            self.messages.cpu.abort()  # the GPU may be reading the tensor: what ends the group waits for that
        while not self.wait(0.1):
            pass


class StagedMessages:
    """Sends and receives of CUDA tensors, on two streams of their own. Sends reach the CPU transport in the order
    of posting; beyond that none waits for another. Whoever waits drives them all, else a thread does."""

    def __init__(
        self,
        cpu: Transport,
        driver: Driver,
        pinned: Pinned,
        streams: tuple[int, int],
        complete: Callable[[int], None],
        late: Callable[[Message, str], CustomBackendError],
    ) -> None:
        self.cpu, self.driver, self.pinned = cpu, driver, pinned
        self._out, self._in = streams
        self.complete, self._late = complete, late
        self._lock = threading.RLock()
        self._by = 0  # the thread that makes progress
        self._fetching: deque[StagedTicket] = deque()  # sends whose bytes are coming from the GPU
        self._moving: list[tuple[StagedTicket, Ticket]] = []  # with the CPU transport, whose ticket is the second
        # Receives whose bytes go to the GPU, and sends that have failed while theirs came: with their tensors, which
        # the GPU still uses.
        self._leaving: deque[StagedTicket] = deque()
        self._thread = MessageThread(self.progress, self._live)
        self._over = False
        self._looked = 0.0

    def post(self, message: Message) -> StagedTicket:
        t = message.tensor
        address = self.pinned.take(t.nbytes)
        ticket = StagedTicket(self, message, address)
        stream_op = ticket.stream_op
        with self._lock, self.driver.activate():
            if self._over:
                self.pinned.give(address)
                raise AbortedError(f"{message.name}: the group is closed")
            if message.is_recv:
                try:
                    self._hand_over(ticket)
                except BaseException:
                    self.pinned.give(address)
                    raise
            else:
                stream_op.begin(self._out)
                if t.nbytes:
                    self.driver.copy(self._out, address, t.data_ptr(), t.nbytes)
                stream_op.finish(self._out)
                self._fetching.append(ticket)
        self._thread.ensure()
        return ticket

    def _hand_over(self, ticket: StagedTicket) -> None:
        m = ticket.message
        left = min(m.timeout, max(0.0, ticket.deadline - time.monotonic()))
        region = Region(ticket.address, m.tensor.nbytes, m.tensor.numel())
        host = changed(m, tensor=region, timeout=left, device=None, stream_op=None, copy_back=[])
        ticket.inner = inner = self.cpu.post(host)
        if ticket.deadline < math.inf:
            inner.want()
        self._moving.append((ticket, inner))

    # --- the engine

    def progress(self) -> bool:
        """Does what can be done now, unless another thread is at it. True if something moved."""
        me = threading.get_ident()
        if self._by not in (0, me):
            return False
        with (
            self._lock,
            self.driver.activate(),
        ):  # not acquire(): a signal handler that raises after it would leave it held
            outer, self._by = self._by, me
            try:
                return self._send_on() | self._take_in() | self._let_go()
            finally:
                self._by = outer

    def _send_on(self) -> bool:
        moved = False
        while self._fetching:
            ticket = self._fetching[0]
            error: Exception | None = None
            try:
                if (end := ticket.stream_op.end) is None or not self.driver.done(end):
                    if time.monotonic() < ticket.deadline and not self._broken():
                        break
                    error = self._late(ticket.message, "what was queued on its stream before")
            except Exception as failed:
                error = failed
            self._fetching.popleft()
            moved = True
            if error is None:
                try:
                    self._hand_over(ticket)
                except Exception as refused:
                    error = refused
            if error is not None:
                # A copy into the memory may still be under way: it is kept until it is over.
                self._leaving.append(ticket)
                ticket.finish(error)
        return moved

    def _broken(self) -> bool:
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return False
        self._looked = now
        return self.cpu.broken()

    def _take_in(self) -> bool:
        moved = False
        for entry in list(self._moving):
            ticket, inner = entry
            if not inner.done():
                continue
            self._moving.remove(entry)
            moved = True
            error, m = inner.error(), ticket.message
            if not m.is_recv or error is not None:
                self.pinned.give(ticket.address)
            else:
                try:
                    ticket.stream_op.begin(self._in)
                    if m.tensor.nbytes:
                        self.driver.copy_in(self._in, m.tensor.data_ptr(), ticket.address, m.tensor.nbytes)
                    if m.copy_back:
                        self.driver.copy_tensors(self._in, m.copy_back)
                    ticket.stream_op.finish(self._in)
                except Exception as failed:
                    error = failed
                self._leaving.append(ticket)
            ticket.finish(error, inner.source)
        return moved

    def _let_go(self) -> bool:
        moved = False
        while self._leaving:
            ticket = self._leaving[0]
            try:
                if (end := ticket.stream_op.end) is not None and not self.driver.done(end):
                    break
            except Exception:
                break  # the GPU has failed: nothing is known of its copies
            self._leaving.popleft()
            self.pinned.give(ticket.address)
            moved = True
        return moved

    def _live(self) -> object:
        return self._fetching or self._moving or self._leaving

    # --- the end

    def leave(self) -> None:
        """The CPU transport has left: what it had is done, and the rest fails."""
        with self._lock:
            self._over = True
            while self._fetching:
                ticket = self._fetching.popleft()
                self._leaving.append(ticket)
                ticket.finish(AbortedError(f"{ticket.message.name}: the group was aborted or destroyed"))
            with self.driver.activate():
                self._take_in()

    def close(self) -> None:
        """After `leave`. The stream is idle, or nothing can be freed."""
        self._thread.end()
        self._thread.join(5.0)
        with self._lock, self.driver.activate():
            self._let_go()
