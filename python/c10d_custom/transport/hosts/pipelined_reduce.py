"""Reductions over hosts of more than fits a message: all_reduce, and reduce to one rank. One call of the native core
(backend/hosts/pipelined_reduce.h) does it all, from the sums inside the hosts to the result in every tensor; here are
made the memory in which chunks wait for the other hosts, and the MPI requests that move them.

What the network carries: all_reduce sends S bytes from each of two hosts, 2 (M-1)/M S from each of M
(reduce-scatter and all-gather of Rabenseifner 2004, by messages to each host).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_char, c_void_p, pointer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import TransportError
from ...native import over_hosts
from ..cuts import chunks, evenly
from ..failure import LATER
from ..trouble import Trouble
from .layout import Reduction, Step
from .link import DATA, SUMS, Buffer
from .local_call import LocalCall
from .mpi_calls import STATUS_BYTES

if TYPE_CHECKING:
    from ctypes import Array

    from mpi4py.MPI import Request

    from ...call import Call
    from ...native import Failure
    from ...native.over_hosts import PipelinedSlot
    from .layout import Hosts
    from .link import MpiLink
    from .mpi_calls import MpiCalls

    Key = tuple[int, int, int, tuple[int, int] | None]  # bytes, dtype, reduce op, root
    Phases = list[list[list["_Phase"]]]  # by slot, length and order
    Span = tuple[int, int]  # address, bytes


_SLOTS = 2  # chunks under way: with more, less of what is moved stays in the caches
_LINE = 64  # bytes of a cache line: parts begin at multiples
_KEPT = 4  # pairs of lengths of which the requests are kept
_PLANS = 64


@dataclass
class _Phase:
    """Transfers of one chunk that go together. ``requests`` begin with one from each of ``peers``, or are all to
    them; so many of them, the first, are ``receives``."""

    requests: Sequence[Request]
    peers: Sequence[int]
    receives: int = 0


@dataclass
class _Plan:
    """What calls have in common. ``pipelined`` is at ``address`` and knows ``statuses``; ``root``: for the core."""

    pipelined: over_hosts.PipelinedReduce
    address: int
    statuses: object
    phases: Phases
    inside: Step
    root: int


class PipelinedReduce:
    """``attempt``: runs a CallArgs in the host's native group; returns None, or a native Failure. ``trouble``: the
    Trouble for one. ``chunk``: bytes that one rank sends at once."""

    def __init__(
        self,
        link: MpiLink,
        calls: MpiCalls,
        hosts: Hosts,
        chunk: int,
        attempt: Callable[[Any], Failure | None],
        trouble: Callable[[Failure], Trouble],
    ) -> None:
        self._link, self._mpi, self._hosts, self._chunk = link, calls, hosts, chunk
        self._attempt, self._trouble = attempt, trouble
        self._carrier = hosts.local < hosts.carriers
        looks = self._looks()
        next(looks)
        self._look = over_hosts.Look(looks.__next__)
        self._slots: list[Buffer] = []
        self._theirs: list[list[Buffer]] = []
        self._plans: dict[Key, _Plan] = {}
        # By lengths of a part, and whom it is for: phases, and the core's slots.
        self._requests: OrderedDict[tuple[tuple[int, ...], int | None], tuple[Phases, Array[PipelinedSlot]]]
        self._requests = OrderedDict()
        self._local_calls = [LocalCall(1, 0), LocalCall(1, 1)]
        self._said: BaseException | None = None

    def reduce(self, number: int, call: Call, deadline: float, outer: int, root: tuple[int, int] | None) -> None:
        """The collective ``number``, all_reduce, or reduce to ``root``, a (host, index). ``outer``: see CallArgs."""
        source, outputs = call.inputs[0], call.outputs
        key = source.nbytes, call.dtype.code, call.redop, root
        self._plan = plan = self._plans.get(key) or self._make_plan(key, call, root)
        pipelined = plan.pipelined
        pipelined.end = 0
        what = call, deadline, number, outer, call.op, plan.inside, plan.root, call.count
        spans = [(source.data_ptr(), source.nbytes)], [(t.data_ptr(), t.nbytes) for t in outputs]
        args = self._local_calls[len(outputs)].fill(*what, *spans, plan.address)
        try:
            failure = self._attempt(args)
            if failure is not None:
                raise self._explain(failure, pipelined)
        except BaseException:
            self._give_up(call)
            raise

    def _make_plan(self, key: Key, call: Call, root: tuple[int, int] | None) -> _Plan:
        hosts, nbytes = self._hosts, key[0]
        cut = chunks(nbytes, self._chunk * hosts.carriers)
        each = -(-cut[0][1] // _LINE) * _LINE if cut else _LINE
        keeps = root is None or root[0] == hosts.mine
        steps = Reduction.of(call.dtype, call.redop, self._link.size)
        pipelined = over_hosts.PipelinedReduce(
            self._mpi.startall,
            self._mpi.testall,
            None,
            self._look,
            int(LATER * 1e9),
            each,
            steps.between.factors,
            None,
            _SLOTS,
            hosts.carriers,
            len(hosts.ranks),
            hosts.mine,
            steps.between.redop,
            keeps,
            0,
            0,
            pointer(self._link.failure_news),
        )
        phases: Phases = []
        statuses: Array[c_char] | None = None
        if self._carrier and cut:
            phases, pipelined.slots = self._carry(
                tuple(self._part(hi - lo) for lo, hi in (cut[0], cut[-1])), root and root[0]
            )
            statuses = (
                c_char * (STATUS_BYTES * max(1, *(len(p.requests) for slot in phases for pair in slot for p in pair)))
            )()
            pipelined.statuses = addressof(statuses)
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan = self._plans[key] = _Plan(
            pipelined, addressof(pipelined), statuses, phases, steps.inside, root[1] if keeps and root else -1
        )
        return plan

    def _explain(self, failure: Failure, pipelined: over_hosts.PipelinedReduce) -> BaseException:
        """Returns what to raise for a native Failure."""
        if pipelined.end == over_hosts.LOOKED and self._said is not None:
            return self._said
        if pipelined.end == over_hosts.LATE:
            phase = self._awaited()
            return self._link.late(phase.requests, phase.peers)
        if pipelined.end == over_hosts.TRANSFER:
            return TransportError("MPI failed in a transfer between hosts.")
        return self._trouble(failure)

    def _give_up(self, call: Call) -> None:
        """Leaves what is under way to MPI, which may go on with it for as long as it likes."""
        phases = [p for made, _ in self._requests.values() for slot in made for pair in slot for p in pair]
        self._link.give_up(
            [r for phase in phases for r in phase.requests],
            (self._slots, self._theirs, self._requests, self._plan, call),
            [r for phase in self._phases() for r in phase.requests[: phase.receives]],
        )
        self._plans, self._slots, self._requests, self._said = {}, [], OrderedDict(), None

    def _awaited(self) -> _Phase:
        """The transfers that the core waits for."""
        phases = self._phases(self._plan.pipelined.slot)
        return next((p for p in phases if p.requests and not self._link.MPI.Request.Testall(p.requests)), phases[0])

    def _phases(self, slot: int | None = None) -> list[_Phase]:
        """Returns the requests of the plan under way, in one slot or in all."""
        slots = self._plan.phases if slot is None else [self._plan.phases[slot]]
        return [phase for pairs in slots for pair in pairs for phase in pair]

    def _looks(self) -> Iterator[int]:
        # The core asks for the next value now and then in a wait for other hosts: 1, if it is in vain. A generator for
        # the sake of signal handlers, as in shm/__init__.py.
        answer = 0
        while True:
            try:
                yield answer
                answer = 0
                self._look_around()
            except GeneratorExit:
                return
            except BaseException as error:
                self._said, answer = error, 1

    def _look_around(self) -> None:
        phase = self._awaited()
        try:
            self._link.check(phase.peers)
        except Trouble:
            # They may have done their part and then gone.
            if not self._link.settle(phase.requests):
                raise

    # --- memory and requests

    def _part(self, nbytes: int) -> int:
        """Bytes of this rank's part of a chunk."""
        cut = evenly(nbytes, self._hosts.carriers, _LINE)
        return cut[self._hosts.local + 1] - cut[self._hosts.local]

    def _carry(self, lengths: tuple[int, ...], root: int | None) -> tuple[Phases, Array[PipelinedSlot]]:
        """What moves parts of these two lengths, of a usual chunk and of the last: (the phases by slot, length and
        order; the core's slots). ``root``: the host that they are for, or None: all."""
        if not self._slots or self._slots[0].nbytes < max(lengths):
            self.free()
            self._slots = [Buffer(max(lengths)) for _ in range(_SLOTS)]
            self._theirs = [[Buffer(max(lengths)) for _ in self._hosts.ranks] for _ in range(_SLOTS)]
        key = lengths, root
        if key not in self._requests:
            while len(self._requests) >= _KEPT:
                self._plans.clear()
                self._free(*self._requests.popitem(last=False)[1])
            phases = [[self._transfers(s, length, root) for length in lengths] for s in range(_SLOTS)]
            self._requests[key] = phases, self._native(phases)
        self._requests.move_to_end(key)
        return self._requests[key]

    def _transfers(self, slot: int, length: int, root: int | None) -> list[_Phase]:
        """The two phases of a part in a slot. Two hosts: all of it goes over, in one phase. More: in the first each
        gets its share, in the second it gives the sum of it to all, or to the root's host."""
        hosts, pieces = self._hosts, self._link.pieces
        receive, send = self._link.comm.Recv_init, self._link.comm.Send_init
        mine, theirs = self._slots[slot].address, self._theirs[slot]
        carriers = {h: hosts.ranks[h][hosts.local] for h in hosts.others}
        sources = [h for h in hosts.others if root in (None, hosts.mine)]
        targets = [h for h in hosts.others if root in (None, h)]

        def phase(
            sources: list[int], targets: list[int], into: Callable[[int], Span], out: Callable[[int], Span], tag: int
        ) -> _Phase:
            requests = [r for h in sources for r in pieces(receive, *into(h), carriers[h], tag)]
            receives = len(requests)
            requests += [r for h in targets for r in pieces(send, *out(h), carriers[h], tag)]
            return _Phase(requests, [carriers[h] for h in sources or targets], receives)

        if len(hosts.ranks) == 2:
            return [
                phase(sources, targets, lambda h: (theirs[h].address, length), lambda h: (mine, length), DATA),
                _Phase([], []),
            ]
        cut = evenly(length, len(hosts.ranks), _LINE)

        def share(host: int) -> Span:
            return mine + cut[host], cut[host + 1] - cut[host]

        own = share(hosts.mine)
        # With a tag of their own: a host may be through with the first phase of later chunks before another is with
        # this one's.
        return [
            phase(hosts.others, hosts.others, lambda h: (theirs[h].address, own[1]), share, DATA),
            phase(sources, targets, share, lambda h: own, SUMS),
        ]

    def _native(self, phases: Phases) -> Array[PipelinedSlot]:
        slots = (over_hosts.PipelinedSlot * _SLOTS)()
        for s, slot in enumerate(slots):
            theirs = (c_void_p * len(self._hosts.ranks))(*[b.address for b in self._theirs[s]])
            slot.mine, slot.theirs = self._slots[s].address, theirs
            for i, pair in enumerate(phases[s]):
                for j, phase in enumerate(pair):
                    slot.phases[2 * i + j] = over_hosts.Phase(self._mpi.array(phase.requests), len(phase.requests))
        return slots

    def _free(self, phases: Phases, slots: Array[PipelinedSlot]) -> None:
        for s, slot in enumerate(phases):
            for i, pair in enumerate(slot):
                for j, phase in enumerate(pair):
                    self._mpi.forget(slots[s].phases[2 * i + j].requests)
                    for request in phase.requests:
                        request.Free()

    def free(self) -> None:
        """Frees the requests. None may be under way."""
        self._plans.clear()
        for phases, slots in self._requests.values():
            self._free(phases, slots)
        self._requests.clear()
