"""Messages of CUDA tensors through a transport of CPU tensors: small ones whole, by way of pinned host memory; of large
ones the Head, and then as pieces.py has it."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...call import Region
from ...errors import AbortedError, CollectiveMismatchError
from ...threads import GPU, rest, threading, time
from ..message_thread import MessageThread
from ..tickets import PyTicket
from .algorithm import whole_bytes
from .host_exchange import Place, for_cpu
from .pieces import Head, Pieces, Receiving, Sending, Transfer

if TYPE_CHECKING:
    from ...call import Message
    from ...errors import CustomBackendError
    from .. import Ticket
    from .driver import Driver
    from .stream_op import StreamOp


_LOOK = 0.02
_KEPT = 64 << 20  # bytes of pinned memory that are kept for messages to come


class Pinned:
    """Pinned host memory, kept for the next one who asks. A signal handler that calls the group may come amid any
    step."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.RLock()
        self._free: dict[int, list[int]] = {}  # bytes -> addresses
        self._kept = 0
        self._closed = False

    def _size(self, nbytes: int) -> int:
        return max(4096, 1 << max(0, nbytes - 1).bit_length())  # few sizes: what is kept fits again

    def take(self, nbytes: int) -> int:
        with self._lock:
            if kept := self._free.get(self._size(nbytes)):
                self._kept -= self._size(nbytes)
                return kept.pop()
        with self._driver.activate():
            return self._driver.allocate_pinned(self._size(nbytes))

    def give(self, address: int, nbytes: int) -> None:
        """No copy from or to it is under way."""
        with self._lock:
            if not self._closed and self._kept < _KEPT:
                self._kept += self._size(nbytes)
                self._free.setdefault(self._size(nbytes), []).append(address)
                return
        with self._driver.activate():
            self._driver.free_pinned(address)

    def close(self) -> None:
        """Frees what is not lent, and from now on what comes back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, {}
        with self._driver.activate():
            for address in (a for addresses in free.values() for a in addresses):
                self._driver.free_pinned(address)


class StagedTicket(PyTicket):
    """A message. A send is done when its bytes have left the memory that they were copied to, a receive when they are
    on their way to the tensor. ``address``: of its pinned memory, or of its Head; ``transfer``: of a large one."""

    def __init__(self, messages: StagedMessages, message: Message) -> None:
        super().__init__(messages.complete)
        self.messages, self.message = messages, message
        stream_op: Any = message.stream_op
        self.stream_op: StreamOp = stream_op
        self.deadline = math.inf  # until it is first waited for
        self.inner: Ticket | None = None  # the CPU transport's ticket
        self.transfer: Transfer | None = None  # until it is done
        self.whole = message.tensor.nbytes <= messages.whole
        if not self.whole:
            self.transfer = (Receiving if message.is_recv else Sending)(messages.pieces, self)
            self.region = Region(ctypes.addressof(self.transfer.head), *[ctypes.sizeof(Head)] * 2)
        else:
            address = messages.pinned.take(message.tensor.nbytes)
            self.region = Region(address, message.tensor.nbytes, message.tensor.numel())

    def give_back(self) -> None:
        """No copy from or to its memory is under way."""
        if self.whole:
            self.messages.pinned.give(self.region.address, self.region.nbytes)

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        super().finish(error, source)
        self.transfer = None  # which has this ticket, and so the tensor

    def want(self) -> None:
        if self.deadline == math.inf:
            self.stream_op.began = time.monotonic()
            self.deadline = self.stream_op.began + self.message.timeout
            if self.inner is not None:
                self.inner.want()
            if self.transfer is not None:
                self.transfer.want()

    def wanted(self) -> bool:
        return self.deadline < math.inf

    def left(self) -> float:
        return min(self.message.timeout, max(0.0, self.deadline - time.monotonic()))

    def late(self) -> bool:
        return time.monotonic() >= self.deadline or self.messages.broken()

    def too_late(self) -> CustomBackendError:
        return self.messages.late(self.message, "what was queued on its stream before")

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        began = time.monotonic()
        self.want()
        while not self._done:
            self.messages.progress()
            waited = time.monotonic() - began
            if self._done or waited >= seconds:
                break
            if self.inner is not None and not self.inner.done():
                self.inner.wait(min(seconds - waited, 1e-3))
            else:
                rest(GPU, waited)
        return self._done

    def withdraw(self) -> None:
        if self.inner is not None:
            self.inner.withdraw()
        if self.inner is None or (not self.whole and self.inner.error() is None):
            self.messages.cpu.abort()  # the GPU may be at the tensor: what ends the group waits for that
        while not self.wait(0.1):
            pass


class StagedMessages:
    """Sends and receives of CUDA tensors, on two streams of their own. Sends reach the CPU transport in the order
    of posting; beyond that none waits for another. Whoever waits drives them all, else a thread does."""

    def __init__(self, place: Place, streams: tuple[int, int], one_host: bool) -> None:
        self.cpu, self.driver, self.late = place.cpu, place.driver, place.late
        self.complete: Callable[[int], None] = place.cpu.complete
        self._out, self._in = streams
        self.whole, self.pinned = whole_bytes(place.config), Pinned(place.driver)
        self.pieces = Pieces(place, streams, one_host and place.config.cuda_mode != "staged")
        self._lock = threading.RLock()
        self._by = 0  # the thread that makes progress
        self._fetching: deque[StagedTicket] = deque()  # sends whose bytes are coming from the GPU
        self._moving: list[tuple[StagedTicket, Ticket]] = []  # with the CPU transport, whose ticket is the second
        self._transfers: list[Transfer] = []  # large messages whose Head has come to its receive
        # Receives whose bytes go to the GPU, and sends that have failed while theirs came: with their tensors, which
        # the GPU still uses.
        self._leaving: deque[StagedTicket] = deque()
        self._thread = MessageThread(self.progress, self._live)
        self._over = False
        self._looked = 0.0

    def post(self, message: Message) -> StagedTicket:
        t = message.tensor
        with self._lock, self.driver.activate():
            if self._over:
                raise AbortedError(f"{message.name}: the group is closed")
            ticket = StagedTicket(self, message)
            if message.is_recv:
                try:
                    self._hand_over(ticket)
                except BaseException:
                    ticket.give_back()
                    raise
            else:
                if ticket.whole:
                    ticket.stream_op.begin(self._out)
                    if t.nbytes:
                        self.driver.copy(self._out, ticket.region.address, t.data_ptr(), t.nbytes)
                    ticket.stream_op.finish(self._out)
                self._fetching.append(ticket)
        self._thread.ensure()
        return ticket

    def _hand_over(self, ticket: StagedTicket) -> None:
        m = ticket.message
        ticket.inner = inner = self.cpu.post(for_cpu(m, tensor=ticket.region, timeout=ticket.left()))
        if ticket.wanted():
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
                return self._send_on() | self._take_in() | self._carry_on() | self._let_go()
            finally:
                self._by = outer

    def _send_on(self) -> bool:
        moved = False
        while self._fetching:
            ticket = self._fetching[0]
            error: Exception | None = None
            try:
                if ticket.whole and not self._there(ticket):
                    if not ticket.late():
                        break
                    error = ticket.too_late()
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

    def _there(self, ticket: StagedTicket) -> bool:
        """Whether the GPU is done with it, as far as it has been told of it."""
        end = ticket.stream_op.end
        return end is not None and self.driver.done(end)

    def broken(self) -> bool:
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
            if ticket.transfer is not None:
                if error is None:
                    self._transfers.append(ticket.transfer)
                    ticket.transfer.start(inner.source)
                    continue
                if isinstance(error, CollectiveMismatchError):
                    text = str(error).replace(f"{ticket.region.nbytes} bytes", f"{m.tensor.nbytes} bytes")
                    error = CollectiveMismatchError(f"{text} More than {self.whole} bytes of a GPU's go to a GPU only.")
            elif not m.is_recv or error is not None:
                ticket.give_back()
            else:
                try:
                    ticket.stream_op.begin(self._in)
                    if m.tensor.nbytes:
                        self.driver.copy_in(self._in, m.tensor.data_ptr(), ticket.region.address, m.tensor.nbytes)
                    if m.copy_back:
                        self.driver.copy_tensors(self._in, m.copy_back)
                    ticket.stream_op.finish(self._in)
                except Exception as failed:
                    error = failed
                self._leaving.append(ticket)
            ticket.finish(error, inner.source)
        return moved

    def _carry_on(self) -> bool:
        moved = False
        for transfer in list(self._transfers):
            moved |= transfer.step()
            with contextlib.suppress(Exception):  # the GPU has failed: nothing is known of its copies
                if transfer.over() and transfer in self._transfers:
                    self._transfers.remove(transfer)
        return moved

    def _let_go(self) -> bool:
        moved = False
        while self._leaving:
            ticket = self._leaving[0]
            try:
                if ticket.stream_op.end is not None and not self._there(ticket):
                    break
            except Exception:
                break  # as above
            self._leaving.popleft()
            ticket.give_back()
            moved = True
        return moved

    def _live(self) -> object:
        return self._fetching or self._moving or self._transfers or self._leaving

    # --- the end

    def prepare_to_leave(self, seconds: float) -> None:
        """What is done here, other ranks are told before the CPU transport leaves."""
        began, waited = time.monotonic(), 0.0
        while any(t.owes() for t in list(self._transfers)) and waited < seconds and not self.cpu.broken():
            if not self.progress():
                rest(GPU, waited)
            waited = time.monotonic() - began

    def leave(self) -> None:
        """The CPU transport has left: what it had is done, and the rest fails."""
        with self._lock:
            self._over = True
            while self._fetching:
                ticket = self._fetching.popleft()
                self._leaving.append(ticket)
                ticket.finish(self._ended(ticket))
            with self.driver.activate():
                self._take_in()
                self._carry_on()
                for transfer in self._transfers:
                    if not transfer.ticket.done():
                        transfer.fail(self._ended(transfer.ticket))

    def _ended(self, ticket: StagedTicket) -> AbortedError:
        return AbortedError(f"{ticket.message.name}: the group was aborted or destroyed")

    def close(self, idle: bool) -> None:
        """After `leave`. ``idle``: the streams are, or nothing can be freed."""
        self._thread.end()
        self._thread.join(5.0)
        with self._lock, self.driver.activate():
            self._let_go()
            self._carry_on()
            if idle:
                self.pieces.close()

    def free(self, unused: bool) -> None:
        """``unused``: no other rank holds memory of this one's any more."""
        if unused:
            self.pieces.free()
        self.pinned.close()
