"""Collectives and messages through pinned host memory and a transport of CPU tensors, which is also how CUDA
tensors reach other hosts.

A collective goes in chunks through two slots of pinned memory: while the CPU transport is at one, the next
comes from the GPU and the last goes back. A slot is used again in the order of one stream, and the host
touches it only after an event that was recorded behind everything before.
"""

import threading
import time
from collections import deque
from dataclasses import replace
from threading import get_ident

from ...call import ANY_COUNT, Memory, Op, Region
from ...errors import AbortedError, CollectiveTimeoutError
from ...threads import start
from ..tickets import PyTicket
from .stream_op import poll

_ALIGN = 256
_MOST = 16 << 20  # bytes of a slot, but for calls whose parts are uneven: those go in one piece
_KEPT = 64 << 20  # bytes of pinned memory kept for messages to come
_IN_PLACE = Op.all_reduce, Op.reduce
_LOOK = 0.02
_LINGER = 0.02


class Pinned:
    """Pinned host memory, kept for the next one who asks. A signal handler that calls the group may come amid any
    step."""

    def __init__(self, driver):
        self._driver = driver
        self._lock = threading.RLock()
        self._free = {}  # bytes -> addresses
        self._kept = 0
        self._all = {}  # address -> bytes
        self._closed = False

    def take(self, nbytes):
        size = max(4096, 1 << (nbytes - 1).bit_length()) if nbytes else 4096
        with self._lock:
            if kept := self._free.get(size):
                address = kept.pop()
                self._kept -= size
                return address
        with self._driver.activate():
            address = self._driver.allocate_pinned(size)
        with self._lock:
            self._all[address] = size
        return address

    def give(self, address):
        """No copy from or to it is under way."""
        with self._lock:
            size = self._all[address]
            if not self._closed and self._kept + size <= _KEPT:
                self._kept += size
                self._free.setdefault(size, []).append(address)
                return
            del self._all[address]
        with self._driver.activate():
            self._driver.free_pinned(address)

    def close(self):
        """Frees what is not lent."""
        with self._lock:
            self._closed = True
            addresses = [a for free in self._free.values() for a in free]
            self._free = {}
            for address in addresses:
                del self._all[address]
        with self._driver.activate():
            for address in addresses:
                self._driver.free_pinned(address)


class StagedCollectives:
    """One collective at a time. ``late(call, what)``: the error of one for which the GPU took too long."""

    def __init__(self, cpu, driver, config, stream, late):
        self.cpu, self.driver, self.stream, self._late = cpu, driver, stream, late
        self._slot_bytes = min(_MOST, config.cuda_staging_bytes // 2)
        self._slots = []
        self._events = [driver.create_event() for _ in range(2)]
        self._size = 0

    def run(self, call, left):
        """Waits for the GPU and for the other ranks. ``left()``: the seconds it still has."""
        pieces = self._pieces(call)
        if len(pieces) > 1:
            self.cpu.agree(call, left())
        in_place = call.op in _IN_PLACE and bool(call.outputs)
        parts = [*call.inputs] if in_place else [*call.inputs, *call.outputs]
        self._reserve(call, max(sum(_room(t.nbytes, lo, hi) for t in parts) for lo, hi in pieces), left)
        staged = deque()
        for i in range(len(pieces) + 1):
            if i < len(pieces):
                staged.append(self._fetch(call, i % 2, *pieces[i], in_place))
            if i:
                self._carry_out(call, (i - 1) % 2, *staged.popleft(), left)

    def _pieces(self, call):
        """The [lo, hi) of every part that go together: alike on all ranks, as far as they agree."""
        longest = max((t.nbytes for t in [*call.inputs, *call.outputs]), default=0)
        if call.count == ANY_COUNT or not longest:
            return [(0, longest)]
        parts = 1 if call.op in (*_IN_PLACE, Op.broadcast) else self.cpu.size + 1
        each = max(_ALIGN, self._slot_bytes // parts // _ALIGN * _ALIGN)
        return [(at, min(longest, at + each)) for at in range(0, longest, each)]

    def _reserve(self, call, nbytes, left):
        if nbytes <= self._size:
            return
        self.driver.record(self._events[0], self.stream)
        if not poll(lambda: self.driver.done(self._events[0]), time.monotonic() + left(), lambda: False):
            raise self._late(call, "what was queued on its stream before")
        self.free()
        self._size = max(nbytes, min(self._slot_bytes, 1 << 20))
        self._slots = [self.driver.allocate_pinned(self._size) for _ in range(2)]

    def _fetch(self, call, slot, lo, hi, in_place):
        """Starts the copies of a piece of the inputs into a slot. (inputs, outputs there; targets)"""
        at = self._slots[slot] if self._slots else 0
        item = call.dtype.item_bytes
        regions = []
        for t in [*call.inputs, *(() if in_place else call.outputs)]:
            nbytes = max(0, min(hi, t.nbytes) - lo)
            regions.append(Region(at, nbytes, nbytes // item))
            at += -(-nbytes // _ALIGN) * _ALIGN
        inputs = regions[: len(call.inputs)]
        outputs = inputs if in_place else regions[len(inputs) :]
        for tensor, region in zip(call.inputs, inputs):
            if region.nbytes:
                self.driver.copy(self.stream, region.address, tensor.data_ptr() + lo, region.nbytes)
        self.driver.record(self._events[slot], self.stream)
        targets = [(t.data_ptr() + lo, r) for t, r in zip(call.outputs, outputs)]
        return inputs, outputs, targets

    def _carry_out(self, call, slot, inputs, outputs, targets, left):
        event = self._events[slot]
        came = poll(lambda: self.driver.done(event), time.monotonic() + left(), self.cpu.broken)
        if not came and not self.cpu.broken():
            raise self._late(call, "what was queued on its stream before")
        count = call.count if call.count == ANY_COUNT else (inputs or outputs or [Region(0, 0, call.count)])[0].count
        self.cpu.run(
            replace(
                call,
                inputs=inputs,
                outputs=outputs,
                count=count,
                timeout=left(),
                memory=Memory.staged,
                device=None,
                stream_op=None,
                copy_back=[],
            )
        )
        for address, region in targets:
            if region.nbytes:
                self.driver.copy(self.stream, address, region.address, region.nbytes)

    def let_go(self):
        """No stream waits for another rank."""

    def free(self):
        slots, self._slots, self._size = self._slots, [], 0
        for address in slots:
            self.driver.free_pinned(address)

    def close(self):
        """The stream is idle."""
        self.free()
        for event in self._events:
            self.driver.destroy_event(event)
        self._events = []


def _room(nbytes, lo, hi):
    return -(-max(0, min(hi, nbytes) - lo) // _ALIGN) * _ALIGN


class StagedTicket(PyTicket):
    """A message. A send is done when its bytes have left the pinned memory, a receive when they are on
    their way to the GPU."""

    def __init__(self, messages, message, address):
        super().__init__(messages.complete)
        self.messages, self.message, self.address = messages, message, address
        self.deadline = message.stream_op.began + message.timeout
        self.fetched = None  # a send: the event behind its copy to the host
        self.inner = None  # the CPU transport's ticket

    def wait(self, seconds, may_run=False):
        until = time.monotonic() + seconds
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

    def withdraw(self):
        if self.inner is not None:
            self.inner.withdraw()
        else:
            self.messages.cpu.abort()  # the GPU may be reading the tensor: what ends the group waits for that
        while not self.wait(0.1):
            pass


class StagedMessages:
    """Sends and receives of CUDA tensors, on two streams of their own. Sends reach the CPU transport in the order
    of posting; beyond that none waits for another. Whoever waits drives them all, else a thread does."""

    def __init__(self, cpu, driver, pinned, streams, complete, late):
        self.cpu, self.driver, self.pinned = cpu, driver, pinned
        self._out, self._in = streams
        self.complete, self._late = complete, late
        self._lock = threading.RLock()
        self._by = 0  # the thread that makes progress
        self._fetching = deque()  # sends whose bytes are coming from the GPU
        self._moving = []  # with the CPU transport
        self._leaving = deque()  # (event, address, stream_op): receives whose bytes go to the GPU
        self._changed = threading.Condition()
        self._thread = None
        self._starts = self._over = False
        self._looked = 0.0

    def post(self, message):
        stream_op, t = message.stream_op, message.tensor
        address = self.pinned.take(t.nbytes)
        ticket = StagedTicket(self, message, address)
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
        self._ensure_thread()
        return ticket

    def _hand_over(self, ticket):
        m = ticket.message
        left = max(0.0, ticket.deadline - time.monotonic())
        region = Region(ticket.address, m.tensor.nbytes, m.tensor.numel())
        ticket.inner = self.cpu.post(replace(m, tensor=region, timeout=left, device=None, stream_op=None, copy_back=[]))
        self._moving.append(ticket)

    # --- the engine

    def progress(self):
        """Does what can be done now, unless another thread is at it. True if something moved."""
        me = get_ident()
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

    def _send_on(self):
        moved = False
        while self._fetching:
            ticket, error = self._fetching[0], None
            try:
                if not self.driver.done(ticket.message.stream_op.end):
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
                self._leaving.append((ticket.message.stream_op, ticket.address))
                ticket.finish(error)
        return moved

    def _broken(self):
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return False
        self._looked = now
        return self.cpu.broken()

    def _take_in(self):
        moved = False
        for ticket in list(self._moving):
            if not ticket.inner.done():
                continue
            self._moving.remove(ticket)
            moved = True
            error, m = ticket.inner.error(), ticket.message
            if not m.is_recv or error is not None:
                self.pinned.give(ticket.address)
            else:
                try:
                    m.stream_op.begin(self._in)
                    if m.tensor.nbytes:
                        self.driver.copy(self._in, m.tensor.data_ptr(), ticket.address, m.tensor.nbytes)
                    if m.copy_back:
                        self.driver.copy_tensors(self._in, m.copy_back)
                    m.stream_op.finish(self._in)
                except Exception as failed:
                    error = failed
                self._leaving.append((m.stream_op, ticket.address))
            ticket.finish(error, ticket.inner.source)
        return moved

    def _let_go(self):
        moved = False
        while self._leaving:
            stream_op, address = self._leaving[0]
            try:
                if stream_op.end is not None and not self.driver.done(stream_op.end):
                    break
            except Exception:
                break  # the GPU has failed: nothing is known of its copies
            self._leaving.popleft()
            self.pinned.give(address)
            moved = True
        return moved

    # --- the thread

    def _ensure_thread(self):
        with self._changed:
            if starts := self._starts:
                self._changed.notify_all()
            self._starts = True
        if not starts:
            try:
                self._thread = start(self._run, "c10d_custom:staged")  # without the lock
            except RuntimeError:
                self._starts = False
                raise

    def _live(self):
        return self._fetching or self._moving or self._leaving

    def _run(self):
        last = time.monotonic()
        while True:
            moved, now = self.progress(), time.monotonic()
            if moved or self._live():
                last = now if moved else last
                time.sleep(100e-6 if now - last < _LINGER else 1e-3)
                continue
            with self._changed:
                if self._over:
                    return
                self._changed.wait_for(lambda: self._over or self._live())
                last = time.monotonic()

    def leave(self):
        """The CPU transport has left: what it had is done, and the rest fails."""
        with self._lock:
            self._over = True
            while self._fetching:
                ticket = self._fetching.popleft()
                self._leaving.append((ticket.message.stream_op, ticket.address))
                ticket.finish(AbortedError(f"{ticket.message.name}: the group was aborted or destroyed"))
            with self.driver.activate():
                self._take_in()

    def close(self):
        """After `leave`. The stream is idle, or nothing can be freed."""
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        with self._lock, self.driver.activate():
            self._let_go()


def timed_out(where, call, device, what):
    """A CollectiveTimeoutError: the GPU, not a rank, is late."""
    seconds = time.monotonic() - call.stream_op.began
    return CollectiveTimeoutError(
        f"{where}: Timed out after {seconds:.3f} s. {device} has not finished {what}; does "
        "a kernel wait for something that does not come?"
    )
