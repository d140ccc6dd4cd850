"""A small all_reduce over several hosts: inside each host by the board in its shared memory, between the hosts' first
ranks, their leaders, by MPI; all in one call of the native core (backend/mpi/direct.h). The network carries each host's
result once to each other host.

The leaders' messages begin as those of direct.py, and go with the same tag, so that a rank that calls something
else is found out by those that hear from it.
"""
import time
from ctypes import addressof, c_char, c_void_p, memmove
from dataclasses import dataclass

from ...errors import TransportError
from ... import native
from .flat_exchange import HEAD_BYTES, announced
from ..failure import LATER, Trouble
from .link import HEAD, Buffer
from .mpi_calls import STATUS_BYTES
from ...native import DirectReduce, Head, lib

# Payloads are sent as one of these lengths, for each of which there are requests.
_LENGTHS = (64, 1024, 4096, 16384, 65536)
SLICE_NS = 2_000_000   # in the core, before Python looks at the group's health
_MOMENT_NS = 5_000_000  # for what is about to be done
_INSIDE = 1            # stage of a DirectReduce


@dataclass(frozen=True)
class _Prepared:
    """What all calls with one dtype, reduce op and length have in common. ``requests``: between the hosts."""
    requests: list
    reduce: DirectReduce


class SmallAllReduce:
    """``limit``: bytes of the largest tensor. ``idle``: the address of a request that lets MPI make progress.
    ``made``: called with each _Prepared and the index of its length."""

    def __init__(self, link, calls, hosts, direct, idle, limit, made):
        self._link, self._direct, self._mpi, self.made = link, direct, calls, made
        self.limit = limit
        self.lengths = [min(length, limit) for length in _LENGTHS]
        self._prepared, self._requests = {}, {}
        self._leads = hosts.local == 0
        self._leaders = [hosts.ranks[h][0] for h in hosts.others] if self._leads else []
        # With room for what a rank sends that takes the other way, since it calls something else.
        results = [Buffer(HEAD_BYTES + limit) for _ in hosts.ranks] if self._leads else []
        self._received = [results[h] for h in hosts.others] if self._leads else []
        self._own = results[hosts.mine] if self._leads else None
        self._receives = [link.comm.Recv_init([b.memory, link.MPI.BYTE], r, HEAD) for b, r in zip(self._received, self._leaders)]
        self._statuses = (c_char * (max(link.size, 2) * STATUS_BYTES))()
        between = (c_void_p * max(1, len(results)))(*[b.address for b in results])
        board = direct.board
        self.way = native.Direct(calls.startall, calls.testall, addressof(self._statuses), idle, board.address, board.stride,
                                 len(hosts.here), hosts.local, between, len(results), hosts.mine)
        self._here, self._board = hosts.here, board

    def _of_length(self, length):
        """(the requests that exchange ``length`` bytes of payload with the other leaders, the address of their handles)."""
        if length not in self._requests:
            requests = list(self._receives)
            if self._leaders:
                message = [self._own.memory[:HEAD_BYTES + length], self._link.MPI.BYTE]
                requests += [self._link.comm.Send_init(message, r, HEAD) for r in self._leaders]
            self._requests[length] = requests, self._mpi.array(requests)
        return self._requests[length]

    def run(self, number, call, deadline):
        tensor, result = call.inputs[0], call.outputs[0]
        if tensor.data_ptr() != result.data_ptr():
            memmove(result.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        index = next(i for i, length in enumerate(self.lengths) if tensor.nbytes <= length)
        self._carry_out(number, call, deadline, index, tensor.nbytes)

    def announce(self, number, call, deadline):
        """Only finds out whether all ranks call the same all_reduce."""
        self._carry_out(number, call, deadline, 0, 0)

    def _carry_out(self, number, call, deadline, index, payload):
        op = announced(call)
        prepared = self._prepared.get((call.dtype.code, call.redop, index, op)) or self._prepare(call, index, op)
        reduce = prepared.reduce
        head = reduce.head
        head.number, head.count, head.payload, head.factor = number, call.count, payload, call.factor
        reduce.data, reduce.stage = call.outputs[0].data_ptr(), 0
        self.go_on(lib.c10d_direct_reduce(self.way, reduce, SLICE_NS), prepared, deadline)

    def go_on(self, status, prepared, deadline):
        """With a call of which the core has said ``status``, until it is done."""
        reduce = prepared.reduce
        while status:
            inside = reduce.stage == _INSIDE
            if status == native.MISMATCH and inside:
                raise Trouble(native.MISMATCH, self._here[reduce.peer])
            if status == native.MISMATCH:
                self._direct.again(reduce.head.number, self._leaders[reduce.peer], self._received[reduce.peer], deadline)
            elif status != native.PENDING:
                raise TransportError("MPI failed in a small all_reduce")
            elif inside:
                if (status := self._look_inside(reduce, deadline)) != native.PENDING:
                    continue
            else:
                self._link.look(prepared.requests, deadline, self._leaders)
            status = lib.c10d_direct_reduce(self.way, reduce, SLICE_NS)

    def _look_inside(self, reduce, deadline):
        """A wait for ranks of this host: raises Trouble if it is in vain, or too long; else the status of the call."""
        awaited = range(1, len(self._here)) if self._leads else [0]
        try:
            self._link.check([self._here[i] for i in awaited])
        except Trouble:
            # They may have done their part and then gone.
            status = lib.c10d_direct_reduce(self.way, reduce, _MOMENT_NS)
            if status == native.PENDING and reduce.stage == _INSIDE:
                raise
            return status
        late = [r for i, r in enumerate(self._here) if not self._board.has(i, reduce.head.number)]
        if not self._leads and self._here[0] not in late:
            deadline += LATER
        if time.monotonic() >= deadline:
            trouble = Trouble(native.TIMEOUT, late[0] if late else -1)
            trouble.missing = late
            raise trouble
        return native.PENDING

    def _prepare(self, kind, index, op):
        dtype, redop = kind.dtype, kind.redop
        steps = self._direct.steps(dtype, redop)
        requests, handles = self._of_length(self.lengths[index])
        reduce = DirectReduce(Head(0, op, redop, dtype.code, -1, 0, 0, 0.0), None, steps.inside.factors, steps.between.factors,
                              handles, len(requests), steps.inside.redop, steps.between.redop)
        prepared = self._prepared[dtype.code, redop, index, op] = _Prepared(requests, reduce)
        self.made(prepared, index)
        return prepared
