"""Collectives of ranks that share a GPU, without a copy: the leader, which is the first rank, reads the tensors of all
ranks and writes those of all ranks, where they lie, in one kernel.

    every rank   its host waits until its stream has come to the call: inputs are there, outputs are free
                 the ranks agree on the call, then tell where their tensors lie (`TensorAddresses`)
    the leader   maps what it does not have mapped yet, runs the kernel, and its host waits until that is done
    every rank   tells that it is through, the leader how it went: nobody goes on before

What becomes of memory that its owner frees while another process has it open, no document of CUDA's says; torch frees
what nobody uses whenever it runs out. So what the leader keeps mapped its owner keeps, too, by the storage of a tensor
in it: the last one of a call. Tensors to which only this module still refers are given up when they become more than
`_limit`: the leader hears of it with the next call. Mapped for one call alone (`once`) are tensors of more than
`_limit` bytes, those beyond as many as are kept, and outputs of all_gather, whose storages FSDP resizes to 0.

A rank that cannot say where its tensors lie (memory that cannot be exported), or a leader that cannot open what the
others have told, lets all ranks take the staging memory instead.

Nobody returns from a call while the kernel may run, except with an error. Then tensors are kept, for the kernel may
still write them, until the leader has closed what it has mapped (before the mark of transport.close_all), or is gone.
"""

from __future__ import annotations

import ctypes as c
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ... import dtypes
from ...call import Call, Op, Region
from ...dtypes import SUM
from ...errors import TransportError
from .algorithm import HALVES, IN_PLACE_RANKS
from .host_exchange import BYTES, Place, tell
from .kernels import COPY, Job
from .mappings import HANDLE_BYTES, Allocation
from .stream_op import come_to

if TYPE_CHECKING:
    from ...call import Buffer
    from .algorithm import Facts


log = logging.getLogger("c10d_custom")

LEADER = 0
TRIALS = 3
_TRIED = 2 << 20  # bytes: torch's least segment, for CUDA cuts smaller ones from a block that lives on
_INTS = dtypes.BY_DTYPE[torch.int32]
_FREED = 8
_KEPT = 64
# How many references there are to a storage. A torch without that function: as if this module's were the only one.
_USE_COUNT: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda storage: 1)


class TensorAddress(c.Structure):
    """Where a tensor lies: ``address`` in the allocation from ``base`` on; of the leader's, ``address`` alone. All 0: a
    tensor of no bytes. ``once``: the allocation is to be closed when the call is over."""

    _fields_ = [
        *((name, c.c_uint64) for name in ("number", "base", "nbytes", "address", "once")),
        ("handle", c.c_ubyte * HANDLE_BYTES),
    ]


class TensorAddresses(c.Structure):
    """What a rank tells: ``owner``: its Driver's identity; ``can``: 1 if ``place`` says where all its tensors lie,
    inputs first; ``freed``: numbers of allocations that it has told before, and keeps no longer."""

    _fields_ = [
        ("owner", c.c_uint64),
        ("can", c.c_uint64),
        ("freed", c.c_uint64 * _FREED),
        ("place", TensorAddress * (IN_PLACE_RANKS + 1)),
    ]


@dataclass
class _Told:
    """An allocation of this rank's that the leader may have open, and what keeps it."""

    allocation: Allocation
    handle: bytes
    storage: torch.UntypedStorage | None = None  # None: it is closed when the call is over

    def lost(self) -> bool:
        """Whether torch has its memory back, though the storage is kept: it was resized to nothing."""
        return self.storage is not None and not self.storage.nbytes()

    def alone(self) -> bool:
        return self.storage is not None and _USE_COUNT(self.storage._cdata) <= 1


class InPlace:
    """One collective at a time; ``left()``: the seconds that it still has."""

    def __init__(self, place: Place, facts: Facts) -> None:
        self._cpu, self._driver, self._stream, self._late = place.cpu, place.driver, place.stream, place.late
        self._facts, self._n, self._me = facts, self._cpu.size, self._cpu.rank
        self._tried = 0  # an address, while it is tried
        self._told: dict[int, _Told] = {}  # by their numbers, told longest ago first
        self._going: list[_Told] = []  # told as freed, which the leader may not have heard yet
        self._limit = HALVES * facts.half  # bytes

    def try_it(self, setup: Any) -> str | None:
        """What keeps the leader from mapping memory that others free and allocate anew, or None: found out by doing
        it. ``setup``: the peers.Setup."""
        problem: str | None = None
        for turn in range(1, TRIALS + 1):
            _, problem = setup.together(functools.partial(self._put_up, turn, setup))
            if problem is None:
                done = self._add_up(setup)
                _, problem = setup.together(functools.partial(self._look, turn, done, setup))
            if problem is not None:
                break
        self._facts.in_place = problem is None
        self.close()
        setup.together(self.free)
        return problem

    def _put_up(self, turn: int, setup: Any) -> None:
        """Memory as torch's allocator takes it, in place of what the turn before has left; this rank's part in it."""
        self._give_back()
        self._tried = self._driver.allocate(_TRIED)
        setup.lies(self._tried, 4, (turn + self._me).to_bytes(4, "little"))

    def _add_up(self, setup: Any) -> bool:
        name, memory = f"{setup.call.name} (trial in place)", [Region(self._tried, 4, 1)]
        call = Call(Op.all_reduce, name, _INTS, setup.left(), memory, memory, count=1, redop=SUM)
        call.stream_op = setup.call.stream_op
        return self.run(call, functools.partial(self._cpu.agree, call, setup.left()), lambda: None, setup.left)

    def _look(self, turn: int, done: bool, setup: Any) -> None:
        if not done:
            raise TransportError("the ranks' memory could not be mapped")
        want = self._n * turn + self._n * (self._n - 1) // 2
        if setup.lies(self._tried, 4) != want.to_bytes(4, "little"):
            raise TransportError(f"what rank {self._me} allocated in place of memory that it had freed was not mapped")

    def _give_back(self) -> None:
        tried, self._tried = self._tried, 0
        if tried:
            self._driver.free(tried)

    def run(
        self, call: Call, agree: Callable[[], object], factors: Callable[[], Any], left: Callable[[], float]
    ) -> bool:
        """False: not all ranks can, and nothing is done. ``agree``: the ranks see that they call alike; ``factors()``:
        of Kernels.reduce, once they have."""
        self._await(call, left, "what was queued before it")
        agree()
        before = len(self._going)
        mine = self._own_addresses(call)
        table = [
            TensorAddresses.from_buffer_copy(said)
            for said in tell(self._cpu, f"{call.name} (where its tensors lie)", left(), bytes(mine))
        ]
        del self._going[:before]  # heard in the call before
        if self._me == LEADER:
            for told in table:
                self._driver.mappings.forget(told.owner, [n for n in told.freed if n])
        if not all(told.can for told in table):
            return False
        done = True
        if self._me == LEADER:
            done = self._lead(call, table, factors, left)
            for told in table:
                self._driver.mappings.forget(told.owner, [p.number for p in told.place if p.once])
        said = tell(self._cpu, f"{call.name} (its end)", left(), bytes([done]))
        self._going.clear()
        if said[LEADER] != bytes([True]):
            self._facts.in_place = False
            log.info("group %s, rank %d: collectives take the staging memory", self._cpu.name, self._me)
            return False
        return True

    def close(self) -> None:
        """The stream is idle."""
        self._driver.mappings.release(self)

    def free(self) -> None:
        """All ranks have closed."""
        self._give_back()
        self._told, self._going = {}, []

    def _await(self, call: Call, left: Callable[[], float], what: str) -> None:
        """Waits until the stream has come here. If the group breaks meanwhile, what follows says why."""
        if not come_to(self._driver, self._stream, time.monotonic() + left(), self._cpu.broken):
            raise self._late(call, what)

    # --- where this rank's tensors lie

    def _own_addresses(self, call: Call) -> TensorAddresses:
        told = TensorAddresses(owner=self._driver.identity)
        for i, number in enumerate(self._freed()):
            told.freed[i] = number
        try:
            for i, tensor in enumerate([*call.inputs, *call.outputs]):
                if tensor.nbytes:
                    once = call.op is Op.all_gather and i >= len(call.inputs)
                    told.place[i] = self._address_of(tensor, once)
            told.can = 1
        except Exception as error:
            log.debug("group %s, rank %d: %s: %s", self._cpu.name, self._me, call.name, error)
        return told

    def _address_of(self, tensor: Buffer, once: bool) -> TensorAddress:
        address = tensor.data_ptr()
        if self._me == LEADER:  # who opens nothing of its own
            return TensorAddress(address=address)
        allocation = self._driver.allocation_of(address)
        if allocation is None or address + tensor.nbytes > allocation.base + allocation.nbytes:
            raise ValueError("memory of a tensor that cannot be exported")
        base, nbytes, number = allocation
        told = self._told.pop(number, None) or _Told(allocation, self._driver.export_memory(base))
        storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
        if storage is not None and not once and storage.nbytes() <= self._limit and len(self._told) < _KEPT:
            told.storage = storage  # at no time is the allocation without one
        if told.storage is not None:
            self._told[number] = told
        place = TensorAddress(number, base, nbytes, address, once=told.storage is None)
        c.memmove(place.handle, told.handle, HANDLE_BYTES)
        return place

    def _freed(self) -> list[int]:
        told = self._told.items()
        gone = [n for n, t in told if t.lost() or self._driver.allocation_of(t.allocation.base) != t.allocation]
        alone = {n: t.storage.nbytes() for n, t in self._told.items() if t.storage is not None and t.alone()}
        held = sum(alone.values())
        for number, nbytes in alone.items():
            if number not in gone and (held > self._limit or len(self._told) - len(gone) >= _KEPT):
                gone.append(number)
                held -= nbytes
        del gone[_FREED:]
        self._going += [self._told.pop(number) for number in gone]
        return gone

    # --- the leader

    def _lead(
        self, call: Call, table: Sequence[TensorAddresses], factors: Callable[[], Any], left: Callable[[], float]
    ) -> bool:
        """False: some memory cannot be opened, and nothing is done."""
        entered: list[tuple[int, int]] = []
        try:
            at = [self._addresses(told, entered) for told in table]
        except Exception as error:
            log.info("group %s, rank %d: %s: %s", self._cpu.name, self._me, call.name, error)
            self._leave(entered)
            return False
        reduces = call.op in (Op.all_reduce, Op.reduce_scatter)
        what: tuple[dtypes.DType, int, Any] = (call.dtype, call.redop, factors()) if reduces else (BYTES, COPY, [])
        self._driver.kernels.reduce(self._stream, *what, jobs_of(call, at))
        self._await(call, left, "the kernel that reads and writes all ranks' tensors")
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
