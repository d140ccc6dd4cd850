"""A small all_reduce over several hosts: inside each host by the call slots in its shared memory, between the hosts'
first ranks, their leaders, by MPI; all in one call of the native core (backend/hosts/leader_all_reduce.h). The network
carries each host's result once to each other host.

The leaders' messages begin as those of flat_exchange.py, and go with the same tag, so that a rank that calls something
else is found out by those that hear from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import addressof, c_char, c_uint64, c_void_p, memmove, pointer
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import dtypes, native
from ...call import Op
from ...errors import TransportError
from ...native import direct, over_hosts
from ...native.over_hosts import CallHeader, LeaderCall, lib
from ..failure import LATER
from ..trouble import Trouble
from .flat_exchange import HEADER_BYTES, announced
from .link import HEADER, Buffer
from .mpi_calls import STATUS_BYTES

if TYPE_CHECKING:
    from mpi4py.MPI import Request

    from ...call import Call
    from ...native import TraceRecord
    from .flat_exchange import FlatExchange
    from .layout import Hosts
    from .link import MpiLink
    from .mpi_calls import MpiCalls


# Payloads are sent as one of these lengths, for each of which there are requests. As many as over_hosts.LENGTHS and
# kLengths of backend/hosts/leader_all_reduce.h.
_LENGTHS = (64, 1024, 4096, 16384, 65536)
SLICE_NS = 2_000_000  # in the core, before Python looks at the group's health
_MOMENT_NS = 5_000_000  # for what is about to be done
_INSIDE = 1  # step of a LeaderCall


@dataclass(frozen=True)
class _Prepared:
    """What all calls with one dtype, reduce op and length have in common. ``requests``: between the hosts."""

    requests: list[Request]
    reduce: LeaderCall


class LeaderAllReduce:
    """``limit``: bytes of the largest tensor. ``idle``: the address of a request that lets MPI make progress.
    ``made``: called with each _Prepared and the index of its length."""

    def __init__(
        self,
        link: MpiLink,
        calls: MpiCalls,
        hosts: Hosts,
        flat: FlatExchange,
        idle: int,
        limit: int,
        made: Callable[[_Prepared, int], None],
    ) -> None:
        self._link, self._flat, self._mpi, self.made = link, flat, calls, made
        self.limit = limit
        self.lengths = [min(length, limit) for length in _LENGTHS]
        self._prepared: dict[tuple[int, int, int, int], _Prepared] = {}  # by dtype, reduce op, length and operation
        self._requests: dict[int, tuple[list[Request], int]] = {}
        self._leads = hosts.local == 0
        self._leaders = [hosts.ranks[h][0] for h in hosts.others] if self._leads else []
        # With room for what a rank sends that takes the other way, since it calls something else.
        results = [Buffer(HEADER_BYTES + limit) for _ in hosts.ranks] if self._leads else []
        self._received = [results[h] for h in hosts.others] if self._leads else []
        self._own = results[hosts.mine] if self._leads else None
        self._receives = [
            link.comm.Recv_init([b.memory, link.MPI.BYTE], r, HEADER) for b, r in zip(self._received, self._leaders)
        ]
        self._statuses = (c_char * (max(link.size, 2) * STATUS_BYTES))()
        between = (c_void_p * max(1, len(results)))(*[b.address for b in results])
        call_slots = flat.call_slots
        self.way = over_hosts.LeaderAllReduce(
            calls.startall,
            calls.testall,
            addressof(self._statuses),
            idle,
            call_slots.address,
            call_slots.stride,
            len(hosts.here),
            hosts.local,
            between,
            len(results),
            hosts.mine,
            pointer(link.failure_news),
        )
        self._here, self._call_slots = hosts.here, call_slots

    def _of_length(self, length: int) -> tuple[list[Request], int]:
        """(the requests that exchange ``length`` bytes of payload with the other leaders, the address of their
        handles)."""
        if length not in self._requests:
            requests: list[Request] = list(self._receives)
            if self._own is not None:
                message = [self._own.memory[: HEADER_BYTES + length], self._link.MPI.BYTE]
                requests += [self._link.comm.Send_init(message, r, HEADER) for r in self._leaders]
            self._requests[length] = requests, self._mpi.array(requests)
        return self._requests[length]

    def free(self) -> None:
        """Frees the requests. None may be under way."""
        for requests, at in self._requests.values():
            self._mpi.forget(at)
            for request in requests[len(self._receives) :]:
                request.Free()
        self._requests.clear()
        for request in self._receives:
            request.Free()

    def give_up(self) -> None:
        """Leaves the transfers of a group that has failed to MPI, with the memory that they use."""
        sends = [r for requests, _ in self._requests.values() for r in requests[len(self._receives) :]]
        self._link.give_up([*self._receives, *sends], self, self._receives)

    def run(self, number: int, call: Call, deadline: float) -> None:
        tensor, result = call.inputs[0], call.outputs[0]
        if tensor.data_ptr() != result.data_ptr():
            memmove(result.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        index = next(i for i, length in enumerate(self.lengths) if tensor.nbytes <= length)
        self._carry_out(number, call, deadline, index, tensor.nbytes)

    def announce(self, number: int, call: Call, deadline: float) -> None:
        """Only finds out whether all ranks call the same all_reduce."""
        self._carry_out(number, call, deadline, 0, 0)

    def _carry_out(self, number: int, call: Call, deadline: float, index: int, payload: int) -> None:
        op = announced(call)
        prepared = self._prepared.get((call.dtype.code, call.redop, index, op)) or self._prepare(call, index, op)
        reduce = prepared.reduce
        header = reduce.header
        header.number, header.count, header.payload, header.factor = number, call.count, payload, call.factor
        reduce.data, reduce.step = call.outputs[0].data_ptr(), 0
        self.go_on(lib.c10d_leader_all_reduce(self.way, reduce, SLICE_NS), prepared, deadline)

    def go_on(self, status: int, prepared: _Prepared, deadline: float) -> None:
        """With a call of which the core has said ``status``, until it is done."""
        reduce = prepared.reduce
        while status:
            inside = reduce.step == _INSIDE
            if status == native.MISMATCH and inside:
                raise Trouble(native.MISMATCH, self._here[reduce.peer])
            if status == native.MISMATCH:
                peer = reduce.peer
                self._flat.again(reduce.header.number, self._leaders[peer], self._received[peer], deadline)
            elif status != native.PENDING:
                raise TransportError("MPI failed in a small all_reduce")
            elif inside:
                if (status := self._look_inside(reduce, deadline)) != native.PENDING:
                    continue
            else:
                self._link.look(prepared.requests, deadline, self._leaders)
            status = lib.c10d_leader_all_reduce(self.way, reduce, SLICE_NS)

    def _look_inside(self, reduce: LeaderCall, deadline: float) -> int:
        """A wait for ranks of this host: raises Trouble if it is in vain, or too long; else the status of the call."""
        awaited = range(1, len(self._here)) if self._leads else [0]
        try:
            self._link.check([self._here[i] for i in awaited])
        except Trouble:
            # They may have done their part and then gone.
            status = lib.c10d_leader_all_reduce(self.way, reduce, _MOMENT_NS)
            if status == native.PENDING and reduce.step == _INSIDE:
                raise
            return status
        late = [r for i, r in enumerate(self._here) if not self._call_slots.has(i, reduce.header.number)]
        if not self._leads and self._here[0] not in late:
            deadline += LATER
        if time.monotonic() >= deadline:
            raise Trouble(native.TIMEOUT, late[0] if late else -1, missing=late)
        return native.PENDING

    def _prepare(self, kind: Call, index: int, op: int) -> _Prepared:
        dtype, redop = kind.dtype, kind.redop
        steps = self._flat.steps(dtype, redop)
        requests, handles = self._of_length(self.lengths[index])
        reduce = LeaderCall(
            CallHeader(0, op, redop, dtype.code, -1, 0, 0, 0.0),
            None,
            steps.inside.factors,
            steps.between.factors,
            handles,
            len(requests),
            steps.inside.redop,
            steps.between.redop,
        )
        prepared = self._prepared[dtype.code, redop, index, op] = _Prepared(requests, reduce)
        self.made(prepared, index)
        return prepared


class LeaderFastPath:
    """``trace``: calls to remember. Until `serve`, all calls go the slow path."""

    def __init__(self, trace: int) -> None:
        self._calls = (c_void_p * ((1 + max(dtypes.BY_CODE)) * over_hosts.REDUCE_OPS * over_hosts.LENGTHS))()
        self._log = (native.TraceRecord * max(1, trace))()
        self._state = over_hosts.LeaderFastPath(
            stopped=1, calls=addressof(self._calls), log=addressof(self._log), room=trace
        )
        self._prepared: dict[int, _Prepared] = {}  # by the address of its LeaderCall
        self.at = addressof(self._state)
        self.sequencer = self.at + over_hosts.LeaderFastPath.sequencer.offset
        # An all_reduce does not ask for rank and size.
        made = direct.collective(lib.c10d_leader_fast_path, self.at, 0, 1)
        self.run: Callable[..., int] = made.run if made is not None else lambda *_: native.SLOW_PATH

    def serve(self, leader: LeaderAllReduce) -> None:
        """Carries out, from now on, calls that ``leader`` has prepared."""
        self._leader = leader
        # The core looks for the first length that a tensor up to the limit fits.
        self._state.limit, self._state.way = min(leader.limit, leader.lengths[-1]), addressof(leader.way)
        self._state.lengths = (c_uint64 * over_hosts.LENGTHS)(*leader.lengths)
        self._state.stopped = 0

    def add(self, prepared: _Prepared, index: int) -> None:
        header, address = prepared.reduce.header, addressof(prepared.reduce)
        if header.op == Op.all_reduce:  # not one of a device's tensors
            self._prepared[address] = prepared
            self._calls[(header.dtype * over_hosts.REDUCE_OPS + header.redop) * over_hosts.LENGTHS + index] = address

    def stop(self) -> None:
        self._state.stopped = 1

    @property
    def runner(self) -> int:
        """The id of the thread that is amid a call; 0: none is."""
        return self._state.runner

    @property
    def under_way(self) -> tuple[int, float]:
        """(number, seconds when it began) of the call."""
        return self._prepared[self._state.now].reduce.header.number, self._state.began * 1e-9

    def go_on(self, status: int, seconds: float) -> None:
        """Ends the call under way, of which the core has said ``status``."""
        self._leader.go_on(status, self._prepared[self._state.now], self._state.began * 1e-9 + seconds)

    def over(self, status: int) -> bool:
        """The call under way has ended with a native status. True if somebody waits for the turn."""
        return lib.c10d_leader_fast_path_over(self.at, status) == native.DONE_WAKE

    def records(self) -> list[TraceRecord]:
        """TraceRecords of the last calls."""
        records = (native.TraceRecord * len(self._log))()
        return records[: lib.c10d_leader_fast_path_log(self.at, addressof(records))]
