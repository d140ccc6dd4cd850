"""Small collectives among the ranks of a few hosts: each rank sends each other rank one message, which
carries its fingerprint and, where it is short, all that the other needs.

One latency, whatever the operation; no rank waits for a step inside its host, which matters most where ranks
outnumber cores. Before larger messages these still go, without payload, so that ranks that disagree find out
(algorithm.py says when).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from ctypes import c_double, c_uint64, c_void_p, memmove, string_at
from typing import TYPE_CHECKING

from ... import native
from ...call import ANY_COUNT, Op
from ...dtypes import PREMUL_SUM
from ...native import lib, over_hosts
from ..disagreement import AT_THE_ROOT
from ..trouble import Trouble
from .balance import BALANCE_BYTES, Balances, fit, of_part
from .layout import Reduction
from .link import HEADER, Buffer

if TYPE_CHECKING:
    from ctypes import Array

    from mpi4py.MPI import Request

    from ...call import Buffer as Tensor
    from ...call import Call
    from ...dtypes import DType
    from .layout import Hosts
    from .link import MpiLink

    HeaderFields = tuple[int, int, int, int, int, int]  # up to the count


# number, op, redop, dtype, root, count; payload bytes, factor, balance (of uneven parts)
_HEADER = struct.Struct(f"<QIIIiQQd{BALANCE_BYTES}s")
_COMPARED = 32
_BEFORE_COUNT = 24
_TINY = 64
_LINE = 128  # bytes: of a slot for calls, what comes before the payload
_DEVICE = 1 << 16  # above the operation: 0 for host memory, else 1 + the ordinal of the device
HEADER_BYTES = _HEADER.size


def announced(call: Call) -> int:
    """Returns a number for the operation and the device of its tensors."""
    return call.op + _DEVICE * (1 + call.ordinal) if call.memory else call.op


def header_of(number: int, call: Call) -> bytes:
    """Returns a header without payload."""
    return _HEADER.pack(number, announced(call), call.redop, call.dtype.code, call.root, call.count, 0, 0.0, b"")


def fingerprint(number: int, call: Call) -> bytes:
    """Returns what must be equal on all ranks, as bytes."""
    return header_of(number, call)[:_COMPARED]


def parse(header: bytes | memoryview) -> tuple[int, ...]:
    """(number, op, redop, dtype, root, count, device) of a header."""
    number, op, *others = _HEADER.unpack(bytes(header[:_COMPARED]) + bytes(HEADER_BYTES - _COMPARED))[:6]
    return number, op % _DEVICE, *others, op // _DEVICE


class CallSlots:
    """The slots in the shared memory of a host's group in which its ranks put up their calls over hosts
    (backend/hosts/call_slots.h). ``payload``: bytes that a slot has room for."""

    def __init__(self, handle: int, local: int, payload: int) -> None:
        self.address: int = lib.c10d_call_slots(handle)
        self.stride = slot_bytes(payload)
        self._local = local

    def put(self, header: bytes) -> None:
        """Puts up this rank's call, ``header``: the bytes of a CallHeader."""
        over_hosts.lib.c10d_put_call(self.address, self.stride, self._local, header)

    def has(self, local: int, number: int) -> bool:
        """Whether a rank of this host has put up that call, or a later one."""
        return c_uint64.from_address(self.address + local * self.stride).value >= number

    def header(self, local: int) -> bytes:
        """Returns the header that a rank of this host has put up last."""
        return string_at(self.address + local * self.stride + 8, HEADER_BYTES)


def slot_bytes(payload: int) -> int:
    return _LINE + (payload + _LINE - 1) // _LINE * _LINE


class FlatExchange:
    """``limit``: payload bytes of a message, at most. ``call_slots``: where each call is put up as well, for those of
    the host that call a small all_reduce (leader_all_reduce.py) and wait for no message; ``balances``: of this rank's
    calls."""

    def __init__(self, link: MpiLink, hosts: Hosts, call_slots: CallSlots, limit: int, balances: Balances) -> None:
        self._link, self.call_slots, self._balances = link, call_slots, balances
        n, self.limit = link.size, max(limit, _TINY)
        self.peers = [r for r in range(n) if r != link.rank]
        self.slots = [Buffer(HEADER_BYTES + self.limit) for _ in range(n)]  # its own: what goes to all alike
        self._out: dict[int, Buffer] = {}  # what is for one peer only
        self.partials = [Buffer(self.limit) for _ in hosts.ranks]
        self._headers = [(p, self.slots[p].memory[:_COMPARED]) for p in self.peers]
        self._said = [slot.memory[HEADER_BYTES - BALANCE_BYTES : HEADER_BYTES] for slot in self.slots]
        # What every call does again: receive from all, and send all the same few bytes.
        self._start = link.MPI.Prequest.Startall
        self.receives = [link.comm.Recv_init([self.slots[p].memory, link.MPI.BYTE], p, HEADER) for p in self.peers]
        tiny = [self.slots[link.rank].memory[: HEADER_BYTES + _TINY], link.MPI.BYTE]
        self._tiny: list[Request] = [link.comm.Send_init(tiny, p, HEADER) for p in self.peers]
        # The payloads of each host's ranks, where the reduce kernel finds them.
        self._by_host = [
            (members, self._addresses([self._payload(r) for r in members]), partial, partial.address)
            for members, partial in zip(hosts.ranks, self.partials)
        ]
        self._between = self._addresses([b.address for b in self.partials])

    def free(self) -> None:
        """Frees the requests. None may be under way."""
        for request in (*self.receives, *self._tiny):
            request.Free()
        self.receives, self._tiny = [], []

    def give_up(self) -> None:
        """Leaves the transfers of a group that has failed to MPI, with the memory that they use."""
        self._link.give_up([*self.receives, *self._tiny], self, self.receives)

    @staticmethod
    def _addresses(values: Sequence[int]) -> Array[c_void_p]:
        return (c_void_p * len(values))(*values)

    def run(self, number: int, call: Call, deadline: float) -> bool:
        """Runs the collective. False: all ranks have agreed on the call, but its parts differ, which only the root knew
        before; no result was written, and the caller is to move the parts another way."""
        uneven = self._exchange(number, call, deadline, payload=True)
        if not uneven:
            _FINISH[call.op](self, call)
        return not uneven

    def announce(self, number: int, call: Call, deadline: float) -> None:
        """Only finds out whether all ranks ask for the same, and their parts fit."""
        self._exchange(number, call, deadline, payload=False)

    def tell(self, number: int, call: Call) -> tuple[list[Request], Buffer]:
        """Sends the fingerprint and waits for nobody. Returns the requests and what they read."""
        buffer = Buffer(HEADER_BYTES)
        header = header_of(number, call)
        self.call_slots.put(header)
        buffer.memory[:HEADER_BYTES] = header
        over_hosts.lib.c10d_transfer_begins()
        return [self._link.comm.Isend([buffer.memory, self._link.MPI.BYTE], p, HEADER) for p in self.peers], buffer

    # --- the exchange

    def _exchange(self, number: int, call: Call, deadline: float, payload: bool) -> bool:
        """Returns whether parts differ in size, and fit each other."""
        me, mine = self._link.rank, self.slots[self._link.rank]
        header = (number, announced(call), call.redop, call.dtype.code, call.root, call.count)
        self.call_slots.put(_HEADER.pack(*header, 0, 0.0, b""))
        self._link.before_sending()
        self._start(self.receives)
        sends: list[Request] | None = None
        if payload and call.inputs:
            if call.op in (Op.reduce_scatter, Op.scatter):
                sends = self._send_parts(header, call)
                mine.fill(HEADER_BYTES, call.inputs[me].data_ptr(), call.inputs[me].nbytes)
            else:
                nbytes = call.inputs[0].nbytes
                mine.fill(HEADER_BYTES, call.inputs[0].data_ptr(), nbytes)
                if call.op in (Op.gather, Op.reduce):
                    _HEADER.pack_into(mine.memory, 0, *header, nbytes, call.factor, b"")
                    sends = [self._send(mine, nbytes if p == call.root else 0, p) for p in self.peers]
                else:
                    sends = self._send_same(header, nbytes, call.factor)
        if sends is None:
            balance = self._balances.of(call) if call.count == ANY_COUNT else b""
            sends = self._send_same(header, 0, call.factor, balance)
        elif call.op in (Op.reduce_scatter, Op.scatter):
            _HEADER.pack_into(mine.memory, 0, *header, 0, call.factor, b"")
        uneven = self._agree(number, call, sends, deadline)
        if uneven and not self._parts_fit(call):
            raise Trouble(native.MISMATCH)
        return uneven

    def _send_same(self, header: HeaderFields, nbytes: int, factor: float, balance: bytes = b"") -> list[Request]:
        mine = self.slots[self._link.rank]
        _HEADER.pack_into(mine.memory, 0, *header, nbytes, factor, balance)
        if nbytes <= _TINY:
            self._start(self._tiny)
            return self._tiny
        message = [mine.memory[: HEADER_BYTES + nbytes], self._link.MPI.BYTE]
        return [self._link.comm.Isend(message, p, HEADER) for p in self.peers]

    def _send_parts(self, header: HeaderFields, call: Call) -> list[Request]:
        sends = []
        for p in self.peers:
            out = self._out.get(p)
            if out is None:
                out = self._out[p] = Buffer(HEADER_BYTES + self.limit)
            nbytes = call.inputs[p].nbytes
            out.fill(HEADER_BYTES, call.inputs[p].data_ptr(), nbytes)
            _HEADER.pack_into(out.memory, 0, *header, nbytes, call.factor, b"")
            sends.append(self._send(out, nbytes, p))
        return sends

    def _send(self, buffer: Buffer, nbytes: int, peer: int) -> Request:
        return self._link.comm.Isend([buffer.memory[: HEADER_BYTES + nbytes], self._link.MPI.BYTE], peer, HEADER)

    def _agree(self, number: int, call: Call, sends: list[Request], deadline: float) -> bool:
        """Waits for everyone's message, and compares. True: there are parts to be compared."""
        self._link.wait(self.receives + sends, deadline, self.peers)
        wanted, uneven = self.slots[self._link.rank].memory[:_COMPARED], call.count == ANY_COUNT
        for p, theirs in self._headers:
            while theirs != wanted:
                if call.op in AT_THE_ROOT and theirs[:_BEFORE_COUNT] == wanted[:_BEFORE_COUNT]:
                    uneven = True
                    break
                self.again(number, p, self.slots[p], deadline)
        return uneven

    def _parts_fit(self, call: Call) -> bool:
        if call.op not in AT_THE_ROOT:
            return fit(self._said)
        counts = [_HEADER.unpack_from(slot.memory)[5] for slot in self.slots]
        if counts[call.root] != ANY_COUNT:
            return False
        parts = [(r, n * call.dtype.item_bytes) for r, n in enumerate(counts) if r != call.root]
        return fit([self._said[call.root], *(of_part(call.op, call.root, r, n) for r, n in parts)])

    def again(self, number: int, peer: int, slot: Buffer, deadline: float) -> None:
        """The message of ``peer`` is another than wanted: that of a call that was refused there and here
        is over, and the next one counts; anything else is a disagreement."""
        if parse(slot.memory)[0] >= number:
            raise Trouble(native.MISMATCH, peer)
        receives = [self._link.comm.Irecv([slot.memory, self._link.MPI.BYTE], peer, HEADER)]
        try:
            self._link.wait(receives, deadline, [peer])
        except BaseException:
            self._link.withdraw(receives, slot)
            raise

    def steps(self, dtype: DType, redop: int) -> Reduction:
        return Reduction.of(dtype, redop, self._link.size)

    # --- what becomes of the payloads

    def _payload(self, rank: int) -> int:
        return self.slots[rank].address + HEADER_BYTES

    def _copy(self, output: Tensor, rank: int) -> None:
        if output.nbytes:
            memmove(output.data_ptr(), self._payload(rank), output.nbytes)

    def _reduce(self, dtype: int, redop: int, target: int, count: int, steps: Reduction) -> None:
        if not count:
            return
        reduce, inside, between = lib.c10d_reduce, steps.inside, steps.between
        factors = inside.factors
        for members, sources, _, address in self._by_host:
            if redop == PREMUL_SUM:
                factors = (c_double * len(members))(*[_HEADER.unpack_from(self.slots[r].memory)[7] for r in members])
            reduce(dtype, inside.redop, address, sources, len(members), count, factors)
        reduce(dtype, between.redop, target, self._between, len(self._by_host), count, between.factors)

    def _finish_reduction(self, call: Call) -> None:
        if call.outputs:
            output = call.outputs[0]
            self._reduce(
                call.dtype.code, call.redop, output.data_ptr(), output.numel(), self.steps(call.dtype, call.redop)
            )

    def _finish_broadcast(self, call: Call) -> None:
        for output in call.outputs:
            self._copy(output, call.root)

    def _finish_gather(self, call: Call) -> None:
        for rank, output in enumerate(call.outputs):
            self._copy(output, rank)

    def _finish_scatter(self, call: Call) -> None:
        self._copy(call.outputs[0], call.root)


_FINISH: dict[Op, Callable[[FlatExchange, Call], None]] = {
    Op.barrier: lambda self, call: None,
    Op.monitored_barrier: lambda self, call: None,
    Op.reduce: FlatExchange._finish_reduction,
    Op.reduce_scatter: FlatExchange._finish_reduction,
    Op.broadcast: FlatExchange._finish_broadcast,
    Op.all_gather: FlatExchange._finish_gather,
    Op.gather: FlatExchange._finish_gather,
    Op.scatter: FlatExchange._finish_scatter,
}
