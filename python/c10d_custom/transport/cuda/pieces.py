"""Large messages of CUDA tensors, in pieces: while one is copied out of the tensor, the one before is on its way and
the one before that is copied in. From GPU to GPU where the receiver can open memory of the sender's, else through
pinned host memory and the transport of CPU tensors.

    sender                                          receiver
    its Head, by the message's own tag              compares sizes, tries to open the memory that the Head offers
                                                    says which way: DEVICE, HOST, or REFUSED
    DEVICE: copies each piece into a slot of that
    memory, then says where it lies                 copies it from there, then says that it is taken: the slot is free
    HOST: copies each piece into a slot,            has a slot for a piece, and says so
    then sends that on                              copies it in, when it has come

A Head is too long to be sent before its receive is there: until then nothing moves, and a message is taken back, or is
late, as any other. What is said is a word each time. A rank has few slots, for all its messages together: one that
holds a slot waits for nothing but what the other side does by itself, so that they come free in any order of messages.
From the Head on, what fails ends the group.
"""

from __future__ import annotations

import ctypes as c
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...call import Region, tag_of_pieces
from ...errors import AbortedError, CollectiveMismatchError, CustomBackendError, TransportError
from .algorithm import MESSAGE_SLOTS, piece_bytes
from .host_exchange import BYTES, Place, for_cpu
from .libcuda import HANDLE_BYTES
from .stream_op import come_to

if TYPE_CHECKING:
    from ...call import Message
    from .. import Ticket
    from .driver import Driver


log = logging.getLogger("c10d_custom")

REFUSED, DEVICE, HOST = 1, 2, 3
_MARK = 64  # bytes in front of the slots, by which the trial knows the memory
_FRONT = 256
_TRIAL = 1.0  # s
_numbers = itertools.count()  # of this process, for a rank may send from several GPUs


class Head(c.Structure):
    """``number``: among its process's large messages; ``process``: its Driver's. All of ``handle`` 0: it offers no
    memory."""

    _fields_ = [
        *((name, c.c_uint64) for name in ("nbytes", "number", "process")),
        ("mark", c.c_ubyte * _MARK),
        ("handle", c.c_ubyte * HANDLE_BYTES),
        ("rest", c.c_ubyte * (16 << 10)),  # so that it is longer than what goes before its receive is there
    ]


class Slot:
    """``event``: behind the copy to or from it; ``ticket``: of the CPU transport, whose it is until that is done."""

    def __init__(self, address: int, event: int) -> None:
        self.address, self.event = address, event
        self.ticket: Any = None


def _taken_while(slots: deque[Slot], over: Callable[[Slot], bool]) -> Iterator[Slot]:
    """The first of them of which that is so; they are taken out."""
    while slots and over(slots[0]):
        yield slots.popleft()


def _has_come(slot: Slot) -> bool:
    """Whether the CPU transport is done with it. Raises what went wrong."""
    if not slot.ticket.done():
        return False
    if (error := slot.ticket.error()) is not None:
        raise error
    return True


class Slots:
    """Places for pieces, in memory from ``address`` on."""

    def __init__(self, driver: Driver, address: int, piece: int) -> None:
        self._driver = driver
        self._all = [Slot(address + i * piece, driver.create_event()) for i in range(MESSAGE_SLOTS)]
        self._free = deque(self._all)

    def take(self) -> Slot | None:
        return self._free.popleft() if self._free else None

    def give(self, slot: Slot) -> None:
        self._free.append(slot)

    def close(self) -> None:
        for slot in self._all:
            self._driver.destroy_event(slot.event)


class Pieces:
    """What the large messages of a group have in common. ``shares``: whether ranks may open each other's memory;
    ``holders``: the ranks that may have opened this one's; ``opened``: what this one has of others, by their handles:
    addresses, 0 where it could not."""

    def __init__(self, place: Place, streams: tuple[int, int], shares: bool) -> None:
        self.cpu, self.driver, self.piece = place.cpu, place.driver, piece_bytes(place.config)
        self.out, self.into = streams
        self.holders: set[int] = set()
        self.opened: dict[bytes, int] = {}
        self.offered = 0  # the address of this rank's memory for others
        self._shares = self._offers = shares
        self._mark, self._handle = b"", b""
        self._pinned: list[int] = []
        self._slots: dict[str, Slots] = {}

    def slots(self, kind: str) -> Slots:
        """``kind``: "offered"; "out" and "in", of pinned memory; "theirs": of other ranks' memory, wherever."""
        if (found := self._slots.get(kind)) is None:
            address = self.offered + _FRONT
            if kind in ("out", "in"):
                address = self.driver.allocate_pinned(MESSAGE_SLOTS * self.piece)
                self._pinned.append(address)
            found = self._slots[kind] = Slots(self.driver, address, self.piece)
        return found

    def head(self, message: Message) -> Head:
        """Of a send, which offers memory where there is some to offer."""
        head = Head(nbytes=message.tensor.nbytes, number=next(_numbers), process=self.driver.process)
        if self._offers and message.peer != self.cpu.rank:
            try:
                if not self.offered:
                    self._offer()
                head.mark[:], head.handle[:] = self._mark, self._handle
                self.holders.add(message.peer)
            except Exception as error:
                self._offers = False
                log.info("group %s, rank %d: messages take host memory: %s", self.cpu.name, self.cpu.rank, error)
        return head

    def _offer(self) -> None:
        address = self.driver.allocate(_FRONT + MESSAGE_SLOTS * self.piece)
        try:
            mark = os.urandom(_MARK)
            self._copy_now(lambda pinned: (address, pinned), mark)
            self._mark, self._handle = mark, self.driver.export_memory(address)
        except BaseException:
            self.driver.free(address)
            raise
        self.offered = address

    def open(self, head: Head) -> int:
        """Where the memory that ``head`` offers is here; 0: it does not offer any that this rank can read."""
        handle = bytes(head.handle)
        if not self._shares or not any(handle):
            return 0
        if handle not in self.opened:
            self.opened[handle] = 0
            if head.process != self.driver.process:  # which could not open its own
                try:
                    self.opened[handle] = address = self.driver.open_memory(handle)
                    if self._copy_now(lambda pinned: (pinned, address)) != bytes(head.mark):
                        raise TransportError("what another rank has written in its GPU memory is not read here")
                except Exception as error:
                    log.info("group %s, rank %d: messages take host memory: %s", self.cpu.name, self.cpu.rank, error)
                    if address := self.opened[handle]:
                        self.opened[handle] = 0
                        self.driver.close_memory(address)
        return self.opened[handle]

    def _copy_now(self, to_and_from: Callable[[int], tuple[int, int]], data: bytes = bytes(_MARK)) -> bytes:
        """Copies a mark between GPU and host; what is then on the host. Not on a stream that may be behind others'
        work."""
        pinned, stream = self.driver.allocate_pinned(_MARK), self.driver.create_stream()
        c.memmove(pinned, data, _MARK)
        self.driver.copy(stream, *to_and_from(pinned), _MARK)
        if not come_to(self.driver, stream, time.monotonic() + _TRIAL, self.cpu.broken):
            raise TransportError(f"a copy of {_MARK} bytes took longer than {_TRIAL:g} s")
        found = c.string_at(pinned, _MARK)
        self.driver.destroy_stream(stream)
        self.driver.free_pinned(pinned)
        return found

    def close(self) -> None:
        """The streams are idle, and no transfer goes on."""
        for slots in self._slots.values():
            slots.close()
        for address in self._pinned:
            self.driver.free_pinned(address)
        for address in filter(None, self.opened.values()):
            self.driver.close_memory(address)
        self._slots, self._pinned, self.opened = {}, [], {}

    def free(self) -> None:
        """No other rank has it open any more."""
        address, self.offered = self.offered, 0
        if address:
            self.driver.free(address)


class Transfer:
    """One message under way. ``ticket``: its StagedTicket. Numbers of pieces: ``granted``, which the receiver has
    copied out of their slots (by way of DEVICE) or has slots for (HOST); ``copied``, whose copy between tensor and slot
    is enqueued here; ``moved_on``, whose copy is over here, and all but what the other side is told of it. ``copying``:
    slots with a copy that is not known to be over."""

    def __init__(self, pieces: Pieces, ticket: Any) -> None:
        m = ticket.message
        self.pieces, self.driver, self.ticket, self.message = pieces, pieces.driver, ticket, m
        self.head = Head() if m.is_recv else pieces.head(m)
        self.count = -(-m.tensor.nbytes // pieces.piece)
        self.peer, self.way = m.peer, 0
        self.granted = self.copied = self.moved_on = self.tag = 0
        self.copying: deque[Slot] = deque()
        self.posted: list[tuple[Ticket, Any]] = []  # with the CPU transport, and what memory they use
        self._ear: Any = None  # (ticket, its word) of the next word that is to come
        self._started = self._stepping = self._failed = False

    # --- driven from outside

    def start(self, source: int) -> None:
        """The Head has come to its receive, which got it from ``source``."""
        self.peer = source if self.message.is_recv else self.peer
        self.tag = tag_of_pieces(self.head.number)

    def step(self) -> bool:
        """Does what can be done now. True if something moved."""
        if self._stepping:  # by an outer frame, below a signal handler
            return False
        self._stepping = True
        try:
            if self._failed:
                return False
            if not self._started:
                self._started = True
                self._start()
                return True
            moved = self._step()
            if not moved and not self.ticket.done() and self._awaits_here() and self.ticket.late():
                raise self.ticket.too_late()
            return moved
        except BaseException as error:
            self.fail(error if isinstance(error, Exception) else AbortedError(f"{self._where()}: interrupted"))
            if not isinstance(error, Exception):
                raise
            return True
        finally:
            self._stepping = False

    def fail(self, error: Exception) -> None:
        self._failed = True
        if not isinstance(error, CollectiveMismatchError):
            self.pieces.cpu.abort()  # the other side must not wait for what will not come
        if isinstance(error, CustomBackendError):
            text = str(error)
            for ours in (self.tag, self.tag - 1):
                text = text.replace(f"tag {ours}", f"tag {self.message.tag}, piece {self.copied + 1} of {self.count}")
            error = type(error)(text)
        self.ticket.finish(error)

    def over(self) -> bool:
        """Nothing of it is under way any more, on the GPU or with the CPU transport."""
        if not self._failed and not self._complete():
            return False
        return all(t.done() for t, _ in self.posted) and all(self.driver.done(s.event) for s in self.copying)

    def owes(self) -> bool:
        """Whether it is done here, but the other side is not told yet."""
        return False

    def want(self) -> None:
        for ticket, _ in list(self.posted):
            ticket.want()

    # --- for both sides

    def _start(self) -> None:
        raise NotImplementedError

    def _step(self) -> bool:
        raise NotImplementedError

    def _complete(self) -> bool:
        raise NotImplementedError

    def _awaits_here(self) -> bool:
        """Whether it waits for this GPU, or for slots; else the CPU transport tells what becomes of it."""
        return bool(self.copying) or not self.posted

    def _copies_over(self) -> Iterator[Slot]:
        return _taken_while(self.copying, lambda slot: self.driver.done(slot.event))

    def _span(self, i: int) -> tuple[int, int]:
        """(address, bytes) of piece i of the tensor."""
        t, at = self.message.tensor, i * self.pieces.piece
        return t.data_ptr() + at, min(self.pieces.piece, t.nbytes - at)

    def _post(self, is_recv: bool, address: int, nbytes: int, keep: Any = None) -> Ticket:
        """To the other side: words of the receiver go by another tag than what comes from the sender."""
        ticket = self.ticket
        tag = self.tag - (is_recv is not self.message.is_recv)
        region = Region(address, nbytes, nbytes)
        what = {"tensor": region, "dtype": BYTES, "peer": self.peer, "tag": tag, "is_recv": is_recv}
        inner: Ticket = self.pieces.cpu.post(for_cpu(self.message, timeout=ticket.left(), **what))
        if ticket.wanted():
            inner.want()
        self.posted.append((inner, keep))
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

    def _where(self) -> str:
        return f"{self.message.name} of group {self.pieces.cpu.name or '(unnamed)'}, rank {self.pieces.cpu.rank}"

    def _unlike(self, theirs: int) -> CollectiveMismatchError:
        m = self.message
        here, there = ("receives", "sends") if m.is_recv else ("sends", "receives")
        return CollectiveMismatchError(
            f"{self._where()}: this rank {here} {m.tensor.nbytes} bytes of {m.dtype.name}, rank {self.peer} {there} "
            f"{theirs} bytes (tag {m.tag})."
        )


class Sending(Transfer):
    """``lent``: slots that the other side, or the CPU transport, has."""

    _ready = False

    def _start(self) -> None:
        self.lent: deque[Slot] = deque()
        self._listen()

    def _step(self) -> bool:
        moved = self._listen_on()
        while self.way and self.copied < (self.count if self.way == DEVICE else self.granted) and self._may_copy():
            if (slot := self._slots().take()) is None:
                break
            self._copy_out(slot)
            moved = True
        for slot in self._copies_over():
            self._send_on(slot)
            moved = True
        for slot in _taken_while(self.lent, _has_come) if self.way == HOST else ():
            self._slots().give(slot)
            moved = True
        self._reap()
        if self._complete():
            self.ticket.finish()
        return moved

    def _complete(self) -> bool:
        return self.way != 0 and self.moved_on == self.granted == self.count and not self.posted

    def _awaits_here(self) -> bool:
        return self.way != 0 and (not self._ready or super()._awaits_here())

    def _may_copy(self) -> bool:
        """Whether what was queued at the issue is done: else slots, and other sends, would wait for it."""
        self._ready = self._ready or self.driver.done(self.ticket.stream_op.ready)
        return self._ready

    def _slots(self) -> Slots:
        return self.pieces.slots("offered" if self.way == DEVICE else "out")

    def _listen_on(self) -> bool:
        moved = False
        while self._has_heard():
            word, moved = self._heard(), True
            if word & 0xFF == REFUSED:
                raise self._unlike(word >> 8)
            if not self.way:
                self.way = word
            else:
                self.granted += 1
                if self.way == DEVICE:
                    self._slots().give(self.lent.popleft())
            if self.granted < self.count:
                self._listen()
        return moved

    def _copy_out(self, slot: Slot) -> None:
        if not self.copied:
            self.ticket.stream_op.begin(self.pieces.out)
        self.driver.copy(self.pieces.out, slot.address, *self._span(self.copied))
        self.driver.record(slot.event, self.pieces.out)
        self.copying.append(slot)
        self.copied += 1
        if self.copied == self.count:
            self.ticket.stream_op.finish(self.pieces.out)

    def _send_on(self, slot: Slot) -> None:
        if self.way == DEVICE:
            self._say(slot.address - self.pieces.offered)
        else:
            slot.ticket = self._post(False, slot.address, self._span(self.moved_on)[1])
        self.moved_on += 1
        self.lent.append(slot)


class Receiving(Transfer):
    """``awaited``: slots into which pieces are to come."""

    def _start(self) -> None:
        self.awaited: deque[Slot] = deque()
        self.base = 0
        if self.head.nbytes != self.message.tensor.nbytes:
            self._say(REFUSED | self.message.tensor.nbytes << 8)
            self.fail(self._unlike(self.head.nbytes))
            return
        self.base = self.pieces.open(self.head)
        self.way = DEVICE if self.base else HOST
        self._say(self.way)
        if self.way == DEVICE:
            self._listen()

    def _step(self) -> bool:
        moved = self._take_from_device() if self.way == DEVICE else self._take_from_host()
        if self.copied == self.count and not self.ticket.done():
            if self.message.copy_back:
                self.driver.copy_tensors(self.pieces.into, self.message.copy_back)
            self.ticket.stream_op.finish(self.pieces.into)
            self.ticket.finish(None, self.peer)
        self._reap()
        return moved

    def _complete(self) -> bool:
        return self.copied == self.moved_on == self.count and not self.posted

    def owes(self) -> bool:
        return self.ticket.done() and not self._failed and not self._complete()

    def _take_from_device(self) -> bool:
        moved, slots = False, self.pieces.slots("theirs")
        while self._has_heard() and (slot := slots.take()) is not None:
            slot.address = self.base + self._heard()
            self._copy_in(slot, self.driver.copy)
            moved = True
            if self.copied < self.count:
                self._listen()
        for slot in self._copies_over():
            slots.give(slot)
            self.moved_on += 1
            self._say(DEVICE)
            moved = True
        return moved

    def _take_from_host(self) -> bool:
        moved, slots = False, self.pieces.slots("in")
        while self.granted < self.count and (slot := slots.take()) is not None:
            slot.ticket = self._post(True, slot.address, self._span(self.granted)[1])
            self.awaited.append(slot)
            self.granted += 1
            self._say(HOST)
            moved = True
        for slot in _taken_while(self.awaited, _has_come):
            self._copy_in(slot, self.driver.copy_in)
            moved = True
        for slot in self._copies_over():
            slots.give(slot)
            self.moved_on += 1
            moved = True
        return moved

    def _copy_in(self, slot: Slot, copy: Callable[[int, int, int, int], None]) -> None:
        if not self.copied:
            self.ticket.stream_op.begin(self.pieces.into)
        address, nbytes = self._span(self.copied)
        copy(self.pieces.into, address, slot.address, nbytes)
        self.driver.record(slot.event, self.pieces.into)
        self.copying.append(slot)
        self.copied += 1
