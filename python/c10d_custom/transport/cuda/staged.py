"""Collectives and messages through pinned host memory and a transport of CPU tensors, which is also how CUDA
tensors reach other hosts.

A collective goes in chunks through two slots of pinned memory: while the CPU transport is at one, the next
comes from the GPU and the last goes back. A slot is used again in the order of one stream, and the host
touches it only after an event that was recorded behind everything before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...call import ANY_COUNT, Memory, Op, Region, changed
from .stream_op import poll

if TYPE_CHECKING:
    from ...call import Buffer, Call
    from ...config import Config
    from ...errors import CustomBackendError
    from .. import Transport
    from .driver import Driver

    # (inputs, outputs in a slot; targets: the addresses to which the outputs go)
    Piece = tuple[list[Region], list[Region], list[tuple[int, Region]]]


_ALIGN = 256
_MOST = 16 << 20  # bytes of a slot, but for calls whose parts are uneven: those go in one piece
_LEAST = 1 << 20
_IN_PLACE = Op.all_reduce, Op.reduce


class StagedCollectives:
    """One collective at a time. ``late(call, what)``: the error of one for which the GPU took too long."""

    def __init__(
        self,
        cpu: Transport,
        driver: Driver,
        config: Config,
        stream: int,
        late: Callable[[Call, str], CustomBackendError],
    ) -> None:
        self.cpu, self.driver, self.stream, self._late = cpu, driver, stream, late
        self._slot_bytes = min(_MOST, config.cuda_staging_bytes // 2)
        self._slots: list[int] = []  # addresses
        self._events = [driver.create_event() for _ in range(2)]
        self._size = 0

    def run(self, call: Call, left: Callable[[], float]) -> None:
        """Waits for the GPU and for the other ranks. ``left()``: the seconds it still has."""
        pieces = self._pieces(call)
        if len(pieces) > 1:
            self.cpu.agree(call, left())
        in_place = call.op in _IN_PLACE and bool(call.outputs)
        parts: list[Buffer] = [*call.inputs] if in_place else [*call.inputs, *call.outputs]
        self._reserve(call, max(sum(_room(t.nbytes, lo, hi) for t in parts) for lo, hi in pieces), left)
        staged: deque[Piece] = deque()
        for i in range(len(pieces) + 1):
            if i < len(pieces):
                staged.append(self._fetch(call, i % 2, *pieces[i], in_place))
            if i:
                self._carry_out(call, (i - 1) % 2, *staged.popleft(), left)

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
        if not poll(lambda: self.driver.done(self._events[0]), time.monotonic() + left(), lambda: False):
            raise self._late(call, "what was queued on its stream before")
        self.free()
        # In steps: growing waits for the GPU, and pinning memory takes its time.
        self._size = max(nbytes, min(self._slot_bytes, max(_LEAST, 1 << (nbytes - 1).bit_length())))
        self._slots = [self.driver.allocate_pinned(self._size) for _ in range(2)]

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
        targets = [(t.data_ptr() + lo, r) for t, r in zip(call.outputs, outputs)]
        return inputs, outputs, targets

    def _carry_out(
        self,
        call: Call,
        slot: int,
        inputs: list[Region],
        outputs: list[Region],
        targets: list[tuple[int, Region]],
        left: Callable[[], float],
    ) -> None:
        event = self._events[slot]
        came = poll(lambda: self.driver.done(event), time.monotonic() + left(), self.cpu.broken)
        if not came and not self.cpu.broken():
            raise self._late(call, "what was queued on its stream before")
        count = call.count if call.count == ANY_COUNT else (inputs or outputs or [Region(0, 0, call.count)])[0].count
        self.cpu.run(
            changed(
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
                self.driver.copy_in(self.stream, address, region.address, region.nbytes)

    def free(self) -> None:
        slots, self._slots, self._size = self._slots, [], 0
        for address in slots:
            self.driver.free_pinned(address)

    def close(self) -> None:
        """The stream is idle."""
        self.free()
        for event in self._events:
            self.driver.destroy_event(event)
        self._events = []


def _room(nbytes: int, lo: int, hi: int) -> int:
    return -(-max(0, min(hi, nbytes) - lo) // _ALIGN) * _ALIGN
