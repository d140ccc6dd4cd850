"""Collectives and messages through pinned host memory and a transport of CPU tensors, which is also how CUDA
tensors reach other hosts.

A collective goes in chunks through two slots of pinned memory: while the CPU transport is at one, the next
comes from the GPU and the last goes back. A slot is used again in the order of one stream, and the host
touches it only after an event that was recorded behind everything before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ...call import ANY_COUNT, Memory, Op, Region
from .host_exchange import Place, for_cpu

if TYPE_CHECKING:
    from ...call import Buffer, Call


_ALIGN = 256
_MOST = 16 << 20  # bytes of a slot, but for calls whose parts are uneven: those go in one piece
_LEAST = 1 << 20
_BEFORE = "what was queued on its stream before"
_IN_PLACE = Op.all_reduce, Op.reduce


class Piece(NamedTuple):
    """What lies in a slot; ``event``: behind its copies; ``targets``: the addresses to which the outputs go."""

    inputs: list[Region]
    outputs: list[Region]
    targets: list[int]
    event: int


class StagedCollectives:
    """One collective at a time."""

    def __init__(self, place: Place) -> None:
        self.cpu, self.driver, self.stream, self._place = place.cpu, place.driver, place.stream, place
        self._slot_bytes = min(_MOST, place.config.cuda_staging_bytes // 2)
        self._slots: list[int] = []  # addresses
        self._events = [self.driver.take_event() for _ in range(2)]
        self._size = 0

    def run(self, call: Call, left: Callable[[], float]) -> None:
        """Waits for the GPU and for the other ranks. ``left()``: the seconds it still has."""
        pieces = self._pieces(call)
        if len(pieces) > 1:
            self.cpu.agree(call, left())
        in_place = call.op in _IN_PLACE and bool(call.outputs)
        parts: list[Buffer] = [*call.inputs] if in_place else [*call.inputs, *call.outputs]
        self._reserve(call, max(sum(_room(t.nbytes, lo, hi) for t in parts) for lo, hi in pieces), left)
        before: Piece | None = None
        for i in range(len(pieces) + 1):
            fetched = self._fetch(call, i % 2, *pieces[i], in_place) if i < len(pieces) else None
            if before is not None:
                self._carry_out(call, before, left)
            before = fetched

    def _pieces(self, call: Call) -> list[tuple[int, int]]:
        """The [lo, hi) of every part that go together: alike on all ranks, as far as they agree."""
        longest = max((t.nbytes for t in [*call.inputs, *call.outputs]), default=0)
        if call.count == ANY_COUNT or not longest:
            return [(0, longest)]
        parts = 1 if call.op in (*_IN_PLACE, Op.broadcast) else self.cpu.size + 1
        each = max(_ALIGN, self._slot_bytes // parts // _ALIGN * _ALIGN)
        return [(at, min(longest, at + each)) for at in range(0, longest, each)]

    def _reserve(self, call: Call, nbytes: int, left: Callable[[], float]) -> None:
        if nbytes <= self._size:
            return
        self.driver.record(self._events[0], self.stream)
        self._require(call, self._events[0], left)
        self.free()
        # In steps: growing waits for the GPU, and pinning memory takes its time.
        self._size = max(nbytes, min(self._slot_bytes, max(_LEAST, 1 << (nbytes - 1).bit_length())))
        self._slots = [self.driver.allocate_pinned(self._size) for _ in range(2)]

    def _require(self, call: Call, event: int, left: Callable[[], float]) -> None:
        """Waits for an event. Where the group is over it may not have come: nobody must read what is copied before
        it."""
        if not self._place.came(call, event, left(), _BEFORE):
            self.cpu.agree(call, left())  # raises, unless only a later call has failed
            raise self._place.late(call, _BEFORE)

    def _fetch(self, call: Call, slot: int, lo: int, hi: int, in_place: bool) -> Piece:
        """Starts the copies of a piece of the inputs into a slot."""
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
        return Piece(inputs, outputs, [t.data_ptr() + lo for t in call.outputs], self._events[slot])

    def _carry_out(self, call: Call, piece: Piece, left: Callable[[], float]) -> None:
        inputs, outputs, targets, event = piece
        self._require(call, event, left)
        count = call.count if call.count == ANY_COUNT else (inputs or outputs or [Region(0, 0, call.count)])[0].count
        changes = {"inputs": inputs, "outputs": outputs, "count": count, "timeout": left()}
        self.cpu.run(for_cpu(call, memory=Memory.staged, **changes))
        for address, region in zip(targets, outputs):
            if region.nbytes:
                self.driver.copy_in(self.stream, address, region.address, region.nbytes)

    def free(self) -> None:
        slots, self._slots, self._size = self._slots, [], 0
        for address in slots:
            self.driver.free_pinned(address)

    def close(self) -> None:
        """The stream is idle."""
        self.free()
        for event in self._events:
            self.driver.give_event(event)
        self._events = []


def _room(nbytes: int, lo: int, hi: int) -> int:
    return -(-max(0, min(hi, nbytes) - lo) // _ALIGN) * _ALIGN
