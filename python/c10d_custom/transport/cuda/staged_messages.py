"""Messages of CUDA tensors through a transport of CPU tensors: small ones whole, by way of pinned host memory. Large
ones go in pieces: while one is copied out of the tensor, the one before is on its way and the one before that is copied
in. From GPU to GPU where the receiver can open memory of the sender's, else through pinned memory, too:

    sender                                          receiver
    its Head, by the message's own tag              compares sizes, tries to open the memory that the Head offers
                                                    says which way: DEVICE, HOST, or REFUSED
    copies each piece into a slot and says so       when it has a slot for it:
    DEVICE: of that memory                          copies it from there, then says that it is taken: the slot is free
    HOST: and sends that on                         receives it, and copies it in

A Head is too long to be sent before its receive is there: until then nothing moves, and a message is taken back, or is
late, as any other. What is said is a word each time. From the Head on, what fails ends the group.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...call import Region, tag_of_pieces
from ...errors import AbortedError, CollectiveMismatchError, CustomBackendError
from ...threads import GPU, rest, threading, time
from ..message_thread import MessageThread
from ..tickets import PyTicket
from .algorithm import whole_bytes
from .host_exchange import BYTES, Place, for_cpu
from .pieces import Head, Pieces, Slot
from .stream_op import poll

if TYPE_CHECKING:
    from ...call import Message
    from .. import Ticket
    from .driver import Driver
    from .stream_op import StreamOp


REFUSED, DEVICE, HOST = 1, 2, 3
_LOOK = 0.02
_KEPT = 64 << 20  # bytes of pinned memory that are kept for messages to come


class Pinned:
    """Pinned host memory, kept for the next one who asks. A signal handler that calls the group may come amid any
    step."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # bytes -> addresses
        self._kept = 0

    def _size(self, nbytes: int) -> int:
        return max(4096, 1 << max(0, nbytes - 1).bit_length())  # few sizes: what is kept fits again

    def take(self, nbytes: int) -> int:
        size = self._size(nbytes)
        try:
            address = self._free[size].pop()
        except IndexError:
            return self._driver.allocate_pinned(size)
        self._kept -= size
        return address

    def give(self, address: int, nbytes: int) -> None:
        """No copy from or to it is under way."""
        if self._kept >= _KEPT:
            self._driver.free_pinned(address)
        else:
            self._kept += self._size(nbytes)
            self._free[self._size(nbytes)].append(address)

    def close(self) -> None:
        """Frees what is not lent, and from now on what comes back."""
        self._kept = _KEPT
        for addresses in self._free.values():
            while addresses:
                self._driver.free_pinned(addresses.pop())


class StagedTicket(PyTicket):
    """A message. A send is done when its bytes have left the memory that they were copied to, a receive when they are
    on their way to the tensor. ``region``: what goes by the message's own tag, a small one or a Head; ``inner``: the
    CPU transport's ticket of that, once it is handed over; ``own``: the slot of a small one, which goes by way of HOST.

    Numbers of pieces: ``told``, of which the receiver has heard; ``copied``, whose copy between tensor and slot is
    enqueued here; ``moved_on``, whose copy is over here, so that they were sent on, or their slots given back.
    ``copying``: slots with a copy that is not known to be over; ``lent``: those that the other side, or the CPU
    transport, has; ``kinds``: of this side's slots, by the way."""

    kinds: dict[int, str]

    def __init__(self, messages: StagedMessages, message: Message) -> None:
        super().__init__(messages.complete)
        self.messages, self.message = messages, message
        self.driver, self.pieces = messages.driver, messages.pieces
        self.stream = messages.into if message.is_recv else messages.out
        stream_op: Any = message.stream_op
        self.stream_op: StreamOp = stream_op
        self.deadline = math.inf  # until it is first waited for
        self.inner: Ticket | None = None
        self._stepping = self._failed = False
        t = message.tensor
        self.count = max(1, -(-t.nbytes // self.pieces.piece))
        self.peer, self.way = message.peer, 0
        self.told = self.copied = self.moved_on = self.tag = 0
        self.copying: deque[Slot] = deque()
        self.lent: deque[Slot] = deque()
        self.posted: list[tuple[Ticket, Any]] = []  # with the CPU transport, and what memory they use
        self._ear: Any = None  # (ticket, its word) of the next word that is to come
        self.own: Slot | None = None
        if t.nbytes <= messages.whole:
            self.way, self.own = HOST, Slot(messages.pinned.take(t.nbytes), 0)
            self.region = Region(self.own.address, t.nbytes, t.numel())
        else:
            self.head = Head() if message.is_recv else self.pieces.head(message)
            self.region = Region(c.addressof(self.head), *[c.sizeof(Head)] * 2)

    # --- driven from outside

    def step(self, may_go: bool) -> bool:
        """Does what can be done now. ``may_go``: whether all sends before it have been handed over. True if something
        moved."""
        if self._stepping or self._failed:  # stepping: in an outer frame, below a signal handler
            return False
        self._stepping = True
        try:
            if self.own is None and not self.tag:
                return self._meet(may_go)
            moved = self._go_on(may_go)
            self._reap()
            if not self._done and self._through():
                self.finish(None, self.inner.source if self.inner is not None else -1)
            if not moved and not self._done and self._awaits_here():
                if time.monotonic() >= self.deadline or self.messages.broken():
                    raise self.messages.late(self.message, "what was queued on its stream before")
            return moved
        except Exception as error:
            self.fail(error)
            return True
        except BaseException:
            self.own = None  # what uses its memory is not known
            self.fail(AbortedError(f"{self.messages.where(self.message)}: interrupted"))
            raise
        finally:
            self._stepping = False

    def hand_over(self) -> Ticket:
        self.inner = inner = self._give(tensor=self.region)
        return inner

    def _meet(self, may_go: bool) -> bool:
        """Of a large one: sends its Head, which then comes to its receive, or fails to."""
        if self.inner is None:
            if may_go:
                self.hand_over()
            return may_go
        if not self.inner.done():
            return False
        error = self.inner.error()
        if isinstance(error, CollectiveMismatchError):
            text = str(error).replace(f"{self.region.nbytes} bytes", f"{self.message.tensor.nbytes} bytes")
            most = f"More than {self.messages.whole} bytes of a CUDA tensor go to a CUDA tensor only"
            text += f" {most}: give one on both ranks, or copy it to the CPU on both."
            error = CollectiveMismatchError(text)
        if error is not None:
            raise error
        self.peer = self.inner.source if self.message.is_recv else self.peer
        self.tag = tag_of_pieces(self.head.number)
        self._start()
        return True

    def fail(self, error: Exception) -> None:
        self._failed = True
        if self.tag and not isinstance(error, CollectiveMismatchError):
            self.messages.cpu.abort()  # the other side must not wait for what will not come
        if self.tag and isinstance(error, CustomBackendError):
            text = str(error)
            for ours in (self.tag, self.tag - 1):
                text = text.replace(f"tag {ours}", f"tag {self.message.tag}, piece {self.copied + 1} of {self.count}")
            error = type(error)(text)
        self.finish(error)

    def over(self) -> bool:
        """Nothing of it is under way any more, on the GPU or with the CPU transport."""
        if not (self._failed or self._all_moved()) or (self.inner is not None and not self.inner.done()):
            return False
        return all(t.done() for t, _ in self.posted) and all(map(self._is_copied, self.copying))

    def give_back(self) -> None:
        """It is over."""
        if self.own is not None:
            self.messages.pinned.give(self.own.address, self.region.nbytes)

    # --- its time, and who waits for it

    def want(self) -> None:
        if self.deadline == math.inf:
            self.stream_op.began = time.monotonic()
            self.deadline = self.stream_op.began + self.message.timeout
            for ticket in (self.inner, *(t for t, _ in list(self.posted))):
                if ticket is not None:
                    ticket.want()

    def left(self) -> float:
        return min(self.message.timeout, max(0.0, self.deadline - time.monotonic()))

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
        if self.inner is None or (self.own is None and self.inner.error() is None):
            self.messages.cpu.abort()  # the GPU may be at the tensor: what ends the group waits for that
        while not self.wait(0.1):
            pass

    # --- of each side

    def _start(self) -> None:
        """Once the Head is there."""
        raise NotImplementedError

    def _go_on(self, may_go: bool) -> bool:
        raise NotImplementedError

    def _through(self) -> bool:
        """Whether its ticket is done."""
        return self._all_moved()

    # --- for both

    def _all_moved(self) -> bool:
        return self.moved_on == self.count and not self.lent and not self.posted

    def _awaits_here(self) -> bool:
        """Whether it waits for this GPU, or for slots; else the CPU transport tells what becomes of it."""
        with_cpu = self.posted or (self.inner is not None and not self.inner.done())
        return bool(self.copying) or not with_cpu

    def _slots(self) -> deque[Slot]:
        """Those that are free."""
        return deque() if self.own is not None else self.pieces.slots(self.kinds[self.way])

    def _is_copied(self, slot: Slot) -> bool:
        end: Any = self.stream_op.end
        return self.driver.done(end if slot is self.own else slot.event)

    def _copies_over(self) -> Iterator[Slot]:
        return _taken_while(self.copying, self._is_copied)

    def _span(self, i: int) -> tuple[int, int]:
        """(address, bytes) of piece i of the tensor."""
        t, at = self.message.tensor, i * self.pieces.piece
        return t.data_ptr() + at, min(self.pieces.piece, t.nbytes - at)

    def _copy(self, slot: Slot) -> None:
        """The next piece, between the tensor and ``slot``."""
        if not self.copied:
            self.stream_op.begin(self.stream)
        address, nbytes = self._span(self.copied)
        copy = self.driver.copy_in if self.message.is_recv and self.way == HOST else self.driver.copy
        if nbytes:
            copy(self.stream, *((address, slot.address) if self.message.is_recv else (slot.address, address)), nbytes)
        if slot is not self.own:
            self.driver.record(slot.event, self.stream)
        self.copying.append(slot)
        self.copied += 1
        if self.copied == self.count:
            if self.message.copy_back:
                self.driver.copy_tensors(self.stream, self.message.copy_back)
            self.stream_op.finish(self.stream)

    def _post(self, is_recv: bool, address: int, nbytes: int, keep: Any = None) -> Ticket:
        """To the other side: what the receiver says goes by another tag than what comes from the sender."""
        tag = self.tag - (is_recv is not self.message.is_recv)
        region = Region(address, nbytes, nbytes)
        inner = self._give(tensor=region, dtype=BYTES, peer=self.peer, tag=tag, is_recv=is_recv)
        self.posted.append((inner, keep))
        return inner

    def _give(self, **changes: Any) -> Ticket:
        """To the CPU transport."""
        inner: Ticket = self.messages.cpu.post(for_cpu(self.message, timeout=self.left(), **changes))
        if self.deadline < math.inf:
            inner.want()
        return inner

    def _say(self, word: int) -> None:
        memory = c.c_uint64(word)
        self._post(False, c.addressof(memory), 8, memory)

    def _listen(self) -> None:
        memory = c.c_uint64()
        self._ear = self._post(True, c.addressof(memory), 8, memory), memory

    def _has_heard(self) -> bool:
        """Whether the word that is awaited has come."""
        return self._ear is not None and self._ear[0].done()

    def _heard(self) -> int:
        """That word."""
        (ticket, memory), self._ear = self._ear, None
        if (error := ticket.error()) is not None:
            raise error
        return int(memory.value)

    def _reap(self) -> None:
        """Lets go of what the CPU transport has done."""
        for entry in [e for e in self.posted if e[0].done()]:
            self.posted.remove(entry)
            if (error := entry[0].error()) is not None:
                raise error

    def _unlike(self, theirs: int) -> CollectiveMismatchError:
        m = self.message
        here, there = ("receives", "sends") if m.is_recv else ("sends", "receives")
        return CollectiveMismatchError(
            f"{self.messages.where(m)}: this rank {here} {m.tensor.nbytes} bytes of {m.dtype.name}, "
            f"rank {self.peer} {there} {theirs} bytes (tag {m.tag})."
        )


class Sending(StagedTicket):
    kinds = {DEVICE: "offered", HOST: "out"}
    _ready = False

    def __init__(self, messages: StagedMessages, message: Message) -> None:
        super().__init__(messages, message)
        if self.own is not None:
            self._copy(self.own)

    def _start(self) -> None:
        self._listen()

    def _go_on(self, may_go: bool) -> bool:
        moved = self._has_heard()
        if moved:
            self.way = self._heard()
            if self.way & 0xFF == REFUSED:
                raise self._unlike(self.way >> 8)
        if not self.way:
            return False
        slots = self._slots()
        while self.copied < self.count and slots and self._may_copy():
            self._copy(slots.popleft())
            moved = True
        for slot in self._copies_over() if may_go or self.own is None else ():
            slot.ticket = self.hand_over() if self.own is not None else self._send_on(slot)
            self.moved_on += 1
            self.lent.append(slot)
            moved = True
        for slot in _taken_while(self.lent, _is_done):
            slots.append(slot)
            moved = True
        return moved

    def _send_on(self, slot: Slot) -> Ticket:
        """The ticket by which the slot comes back: of the piece, or of what the other side says, without a word."""
        self._say(slot.address - (self.pieces.offered or 0))
        if self.way == DEVICE:
            return self._post(True, slot.address, 0)
        return self._post(False, slot.address, self._span(self.moved_on)[1])

    def _may_copy(self) -> bool:
        """Whether what was queued at the issue is done: else slots, and other sends, would wait for it."""
        self._ready = self._ready or self.driver.done(self.stream_op.ready)
        return self._ready

    def _awaits_here(self) -> bool:
        return self.way != 0 and (self.copied < self.count and not self._ready or super()._awaits_here())


class Receiving(StagedTicket):
    kinds = {DEVICE: "theirs", HOST: "in"}

    def __init__(self, messages: StagedMessages, message: Message) -> None:
        super().__init__(messages, message)
        try:
            inner = self.hand_over()
        except BaseException:
            self.give_back()
            raise
        if self.own is not None:
            self.own.ticket = inner
            self.lent.append(self.own)

    def _start(self) -> None:
        if self.head.nbytes != self.message.tensor.nbytes:
            self._say(REFUSED | self.message.tensor.nbytes << 8)
            raise self._unlike(self.head.nbytes)
        self.base = self.pieces.open(self.head)
        self.way = DEVICE if self.base else HOST
        self._say(self.way)
        self._listen()

    def _go_on(self, may_go: bool) -> bool:
        moved, slots = False, self._slots()
        while slots and self._has_heard():
            word, slot = self._heard(), slots.popleft()
            if self.way == DEVICE:
                slot.address = self.base + word
            else:
                slot.ticket = self._post(True, slot.address, self._span(self.told)[1])
            self.lent.append(slot)
            self.told += 1
            if self.told < self.count:
                self._listen()
            moved = True
        for slot in _taken_while(self.lent, _is_done):
            self._copy(slot)
            moved = True
        for slot in self._copies_over():
            slots.append(slot)
            self.moved_on += 1
            if self.way == DEVICE:
                self._post(False, slot.address, 0)
            moved = True
        return moved

    def _through(self) -> bool:
        return self.copied == self.count

    def owes(self) -> bool:
        """Whether it is done here, but the other side is not told yet."""
        return self.way == DEVICE and self._done and not self._failed and not self._all_moved()


def _taken_while(slots: deque[Slot], over: Callable[[Slot], bool]) -> Iterator[Slot]:
    """The first of them of which that is so; they are taken out."""
    while slots and over(slots[0]):
        yield slots.popleft()


def _is_done(slot: Slot) -> bool:
    """Whether the CPU transport is done with it. Raises what went wrong."""
    if slot.ticket is None or not slot.ticket.done():
        return slot.ticket is None
    if (error := slot.ticket.error()) is not None:
        raise error
    return True


class StagedMessages:
    """Sends and receives of CUDA tensors, on two streams of their own. Sends reach the CPU transport in the order
    of posting; beyond that none waits for another. Whoever waits drives them all, else a thread does."""

    def __init__(self, place: Place, streams: tuple[int, int], one_host: bool) -> None:
        self.cpu, self.driver, self.late, self.where = place.cpu, place.driver, place.late, place.where
        self.complete: Callable[[int], None] = place.cpu.complete
        self.out, self.into = streams
        self.whole, self.pinned = whole_bytes(place.config), Pinned(place.driver)
        self.pieces = Pieces(place, one_host and place.config.cuda_mode != "staged")
        self._lock = threading.RLock()
        self._by = 0  # the thread that makes progress
        self._live: list[StagedTicket] = []  # in the order of posting; with their tensors, which the GPU may still use
        self._thread = MessageThread(self.progress, lambda: self._live)
        self._over = self._broken = False
        self._looked = 0.0

    def post(self, message: Message) -> StagedTicket:
        kind = Receiving if message.is_recv else Sending
        with self._lock, self.driver.activate():
            if self._over:
                raise AbortedError(f"{message.name}: the group is closed")
            ticket = kind(self, message)
            self._live.append(ticket)
        self._thread.ensure()
        return ticket

    def progress(self) -> bool:
        """Does what can be done now, unless another thread is at it. True if something moved."""
        me = threading.get_ident()
        if self._by not in (0, me):
            return False
        # Not acquire(): a signal handler that raises after it would leave it held.
        with self._lock, self.driver.activate():
            outer, self._by = self._by, me
            try:
                return self._step()
            finally:
                self._by = outer

    def _step(self) -> bool:
        moved, may_go = False, True
        for ticket in list(self._live):
            moved |= ticket.step(may_go)
            may_go = may_go and (ticket.message.is_recv or ticket.inner is not None or ticket.done())
            with contextlib.suppress(Exception):  # the GPU has failed: nothing is known of its copies
                if ticket.over() and ticket in self._live:
                    self._live.remove(ticket)
                    ticket.give_back()
        return moved

    def broken(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            self._looked, self._broken = now, self.cpu.broken()
        return self._broken

    # --- the end

    def prepare_to_leave(self, seconds: float) -> None:
        """What is done here, other ranks are told before the CPU transport leaves."""

        deadline = time.monotonic() + seconds

        def told() -> bool:
            # A piece that has moved makes room for the next: no reason to rest.
            while self.progress() and time.monotonic() < deadline:
                pass
            return not any(isinstance(t, Receiving) and t.owes() for t in list(self._live))

        poll(told, deadline, self.cpu.broken)

    def leave(self) -> None:
        """The CPU transport has left: what it had is done, and the rest fails."""
        with self._lock, self.driver.activate():
            self._over = True
            for ticket in list(self._live):
                if ticket.inner is not None:
                    ticket.step(False)
                if not ticket.done():
                    ticket.fail(AbortedError(f"{ticket.message.name}: the group was aborted or destroyed"))

    def close(self, idle: bool) -> None:
        """After `leave`. ``idle``: the streams are, or nothing can be freed."""
        self._thread.end()
        self._thread.join(5.0)
        with self._lock, self.driver.activate():
            self._step()
            if idle:
                self.pieces.close()

    def free(self, unused: bool) -> None:
        """``unused``: no other rank holds memory of this one's any more."""
        if unused:
            self.pieces.free()
        self.pinned.close()
