"""Where the pieces of large messages of CUDA tensors lie on their way: in GPU memory that a rank offers to the others,
or in pinned host memory. What is done with them: staged_messages.py.

A rank has few slots, for all its messages together: one that holds a slot waits for nothing but what the other side
does by itself, so that they come free in any order of messages.
"""

from __future__ import annotations

import ctypes as c
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .algorithm import MESSAGE_SLOTS, piece_bytes
from .mappings import HANDLE_BYTES

if TYPE_CHECKING:
    from ...call import Message
    from .host_exchange import Place


log = logging.getLogger("c10d_custom")

_FRONT = 256  # bytes before the slots of memory that is offered
_TRIAL = 1.0  # s
_numbers = itertools.count()  # of this process, for a rank may send from several GPUs


class Head(c.Structure):
    """``number``: among its process's large messages; ``process``: its Driver's. All of ``handle`` 0: it offers no
    memory."""

    _fields_ = [
        *((name, c.c_uint64) for name in ("nbytes", "number", "process")),
        ("handle", c.c_ubyte * HANDLE_BYTES),
        ("rest", c.c_ubyte * (16 << 10)),  # so that it is longer than what goes before its receive is there
    ]


class Slot:
    """``event``: behind the copy to or from it; ``ticket``: of the CPU transport, whose it is until that is done."""

    def __init__(self, address: int, event: int) -> None:
        self.address, self.event = address, event
        self.ticket: Any = None


class Pieces:
    """What the large messages of a group have in common. ``shares``: whether ranks may open each other's memory;
    ``offered``: the address of this rank's for others, None before it is wanted, 0 where there is none; ``holders``:
    the ranks that may have opened that; ``opened``: what this one has of others, by their handles: addresses, 0 where
    it could not."""

    def __init__(self, place: Place, shares: bool) -> None:
        self.cpu, self.driver, self.piece = place.cpu, place.driver, piece_bytes(place.config)
        self.holders: set[int] = set()
        self.opened: dict[bytes, int] = {}
        self.offered: int | None = None
        self._place, self._shares = place, shares
        self._handle = b""
        self._pinned: list[int] = []
        self._all: list[Slot] = []
        self._free: dict[str, deque[Slot]] = {}

    def slots(self, kind: str) -> deque[Slot]:
        """Those that are free. ``kind``: "offered"; "out" and "in", of pinned memory; "theirs": of other ranks' memory,
        wherever."""
        if kind not in self._free:
            address = (self.offered or 0) + _FRONT
            if kind in ("out", "in"):
                address = self.driver.allocate_pinned(MESSAGE_SLOTS * self.piece)
                self._pinned.append(address)
            made = [Slot(address + i * self.piece, self.driver.take_event()) for i in range(MESSAGE_SLOTS)]
            self._all += made
            self._free[kind] = deque(made)
        return self._free[kind]

    def head(self, message: Message) -> Head:
        """Of a send, which offers memory where there is some to offer."""
        head = Head(nbytes=message.tensor.nbytes, number=next(_numbers), process=self.driver.process)
        if self._shares and message.peer != self.cpu.rank:
            if self.offered is None:
                nbytes = _FRONT + MESSAGE_SLOTS * self.piece
                self.offered, self._handle = self._tried(self._place.offer, nbytes) or (0, b"")
            if self.offered:
                head.handle[:] = self._handle
                self.holders.add(message.peer)
        return head

    def open(self, head: Head) -> int:
        """Where the memory that ``head`` offers is here; 0: it does not offer any that this rank can read."""
        handle = bytes(head.handle)
        if not self._shares or not any(handle) or head.process == self.driver.process:  # which cannot open its own
            return 0
        if handle not in self.opened:
            self.opened[handle] = self._tried(self._place.open_offered, handle) or 0
        return self.opened[handle]

    def _tried(self, step: Callable[..., Any], what: Any) -> Any:
        """What ``step`` gives, or None."""
        try:
            return step(what, _TRIAL)
        except Exception as error:
            log.info("group %s, rank %d: messages take host memory: %s", self.cpu.name, self.cpu.rank, error)
            return None

    def close(self) -> None:
        """The streams are idle, and no transfer goes on."""
        for slot in self._all:
            self.driver.give_event(slot.event)
        for address in self._pinned:
            self.driver.free_pinned(address)
        for address in filter(None, self.opened.values()):
            self.driver.close_memory(address)
        self._all, self._free, self._pinned, self.opened = [], {}, [], {}

    def free(self) -> None:
        """No other rank has it open any more."""
        address, self.offered = self.offered, 0
        if address:
            self.driver.free(address)
