"""Collectives of ranks that share a GPU, without a copy: the leader, which is the first rank, reads the tensors of all
ranks and writes those of all ranks, where they lie, in one kernel.

    every rank   its host waits until its stream has come to the call: inputs are there, outputs are free
                 the ranks agree on the call, then tell where their tensors lie (`TensorAddresses`)
    the leader   maps what it does not have mapped yet, runs the kernel, and its host waits until that is done
    every rank   tells that it is through, the leader how it went: nobody goes on before

A rank that cannot say where its tensors lie (memory that cannot be exported), or a leader that cannot open what the
others have told, lets all ranks take the staging memory instead: all are told the same.

Hosts wait, and no stream for another process's: nobody returns from a call while the kernel may run, except with an
error. Then tensors are kept, for the kernel may still write them, until the leader has closed what it has mapped
(`close`, before the mark of transport.close_all), or is gone.
"""

from __future__ import annotations

import ctypes as c
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...call import Op
from ...dtypes import RedOp
from .host_exchange import BYTES, tell
from .kernels import Job
from .mappings import Allocation
from .stream_op import poll

if TYPE_CHECKING:
    from ...call import Buffer, Call
    from ...errors import CustomBackendError
    from ..base import LocalTransport
    from .driver import Driver


log = logging.getLogger("c10d_custom")

MAX_RANKS = 16
LEADER = 0
_OPS = Op.all_reduce, Op.broadcast, Op.all_gather, Op.reduce_scatter
_COPY = int(RedOp.BOR)  # of a single source: its bits
_HANDLE = 64
_FREED = 8
_KEPT = 64


class TensorAddress(c.Structure):
    """Where a tensor lies: ``address`` in the allocation from ``base`` on; of the leader's, ``address`` alone. All 0: a
    tensor of no bytes."""

    _fields_ = [
        ("number", c.c_uint64),
        ("base", c.c_uint64),
        ("nbytes", c.c_uint64),
        ("address", c.c_uint64),
        ("handle", c.c_ubyte * _HANDLE),
    ]


class TensorAddresses(c.Structure):
    """What a rank tells: ``owner``: its Driver's identity; ``can``: 1 if ``place`` says where all its tensors lie,
    inputs first; ``freed``: numbers of allocations that it has told before, and that are no more."""

    _fields_ = [
        ("owner", c.c_uint64),
        ("can", c.c_uint64),
        ("freed", c.c_uint64 * _FREED),
        ("place", TensorAddress * (MAX_RANKS + 1)),
    ]


class InPlace:
    """``late(call, what)``: the error of a call for which the GPU took too long. One collective at a time."""

    def __init__(self, cpu: LocalTransport, driver: Driver) -> None:
        self._cpu, self._driver = cpu, driver
        self._n, self._me = cpu.size, cpu.rank
        self._told: dict[int, tuple[Allocation, bytes]] = {}  # number -> it and its handle, told longest ago first
        self._off = False

    def takes(self, call: Call, least: int) -> bool:
        """Whether it is for such a call: alike on all ranks that call alike. ``least``: bytes from which on it pays."""
        nbytes = max(sum(t.nbytes for t in side) for side in (call.inputs, call.outputs))
        return not self._off and call.op in _OPS and nbytes > least

    def run(
        self,
        call: Call,
        stream: int,
        agree: Callable[[], object],
        factor: Callable[[], Any],
        left: Callable[[], float],
        late: Callable[[Call, str], CustomBackendError],
    ) -> bool:
        """False: not all ranks can, and nothing is done. ``agree``: the ranks see that they call alike; ``factor()``:
        of Driver.reduce, once they have."""
        self._await(stream, call, left, late, "what was queued before it")
        agree()
        mine = self._own_addresses(call)
        table = [
            TensorAddresses.from_buffer_copy(said)
            for said in tell(self._cpu, f"{call.name} (where its tensors lie)", left(), bytes(mine))
        ]
        if self._me == LEADER:
            for told in table:
                self._driver.mappings.forget(told.owner, [n for n in told.freed if n])
        if not all(told.can for told in table):
            return False
        done = True
        if self._me == LEADER:
            done = self._lead(call, stream, table, factor, functools.partial(self._await, stream, call, left, late))
        said = tell(self._cpu, f"{call.name} (its end)", left(), bytes([done]))
        if said[LEADER] != bytes([True]):
            self._off = True
            log.info("group %s, rank %d: collectives take the staging memory", self._cpu.name, self._me)
            return False
        return True

    def close(self) -> None:
        """The stream is idle."""
        self._driver.mappings.release(self)

    def _await(
        self,
        stream: int,
        call: Call,
        left: Callable[[], float],
        late: Callable[[Call, str], CustomBackendError],
        what: str,
    ) -> None:
        """Waits until the stream has come here. If the group breaks meanwhile, what follows says why."""
        event = self._driver.create_event()
        try:
            self._driver.record(event, stream)
            done = functools.partial(self._driver.done, event)
            if not poll(done, time.monotonic() + left(), self._cpu.broken):
                raise late(call, what)
        finally:
            self._driver.destroy_event(event)

    # --- where this rank's tensors lie

    def _own_addresses(self, call: Call) -> TensorAddresses:
        told = TensorAddresses(owner=self._driver.identity)
        for i, number in enumerate(self._freed()):
            told.freed[i] = number
        try:
            for i, tensor in enumerate([*call.inputs, *call.outputs]):
                if tensor.nbytes:
                    told.place[i] = self._address_of(tensor)
            told.can = 1
        except Exception as error:
            log.debug("group %s, rank %d: %s: %s", self._cpu.name, self._me, call.name, error)
        return told

    def _address_of(self, tensor: Buffer) -> TensorAddress:
        address = tensor.data_ptr()
        if self._me == LEADER:  # who opens nothing of its own
            return TensorAddress(address=address)
        allocation = self._driver.allocation_of(address)
        if allocation is None or address + tensor.nbytes > allocation.base + allocation.nbytes:
            raise ValueError("memory of a tensor that cannot be exported")
        base, nbytes, number = allocation
        told = self._told.pop(number, None) or (allocation, self._driver.export_memory(base))
        self._told[number] = told
        while len(self._told) > _KEPT:
            del self._told[next(iter(self._told))]
        place = TensorAddress(number, base, nbytes, address)
        c.memmove(place.handle, told[1], _HANDLE)
        return place

    def _freed(self) -> list[int]:
        gone = [n for n, (a, _) in self._told.items() if self._driver.allocation_of(a.base) != a][:_FREED]
        for number in gone:
            del self._told[number]
        return gone

    # --- the leader

    def _lead(
        self,
        call: Call,
        stream: int,
        table: Sequence[TensorAddresses],
        factor: Callable[[], Any],
        await_it: Callable[[str], None],
    ) -> bool:
        """False: some memory cannot be opened, and nothing is done."""
        entered: list[tuple[int, int]] = []
        try:
            at = [self._addresses(told, entered) for told in table]
        except Exception as error:
            log.info("group %s, rank %d: %s: %s", self._cpu.name, self._me, call.name, error)
            self._leave(entered)
            return False
        jobs = jobs_of(call, at)
        if call.op in (Op.all_reduce, Op.reduce_scatter):
            self._driver.reduce(stream, call.dtype, call.redop, factor(), jobs)
        else:
            self._driver.reduce(stream, BYTES, _COPY, None, jobs)
        await_it("the kernel that reads and writes all ranks' tensors")
        self._leave(entered)
        return True

    def _addresses(self, told: TensorAddresses, entered: list[tuple[int, int]]) -> list[int]:
        """Of a rank's tensors, as the leader reaches them: its own, and those of no bytes, as they are told."""
        found = []
        for p in told.place:
            base = p.base
            if p.nbytes:
                allocation = Allocation(p.base, p.nbytes, p.number)
                base = self._driver.mappings.enter(self, told.owner, allocation, bytes(p.handle))
                entered.append((told.owner, p.number))
            found.append(base + p.address - p.base)
        return found

    def _leave(self, entered: Sequence[tuple[int, int]]) -> None:
        for owner, number in entered:
            self._driver.mappings.leave(self, owner, number)


def jobs_of(call: Call, at: Sequence[Sequence[int]]) -> list[Job]:
    """What the leader's kernel does; its own ``call`` tells the sizes. ``at[rank]``: addresses of a rank's inputs,
    then outputs. Elements of what is only moved are bytes."""
    ranks, item = range(len(at)), call.dtype.item_bytes
    if call.op is Op.all_reduce:
        return [Job([a[0] for a in at], [a[1] for a in at], call.inputs[0].nbytes // item)]
    if call.op is Op.reduce_scatter:
        return [Job([a[r] for a in at], [at[r][len(at)]], call.inputs[r].nbytes // item) for r in ranks]
    if call.op is Op.broadcast:
        (tensor,) = [*call.inputs, *call.outputs]
        return [Job([at[call.root][0]], [at[r][0] for r in ranks if r != call.root], tensor.nbytes)]
    moved = [(r, at[r][0], [a[1 + r] for a in at if a[1 + r] != at[r][0]]) for r in ranks]
    return [Job([source], targets, call.outputs[r].nbytes) for r, source, targets in moved]
