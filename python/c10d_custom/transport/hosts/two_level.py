"""Collectives over several hosts in levels: one step inside each host, by the native core; one
between hosts, over MPI, in which the carriers (the first ranks of each host, as many on every host) each
carry their part of the data; and another inside the hosts. Large messages are cut into chunks, several
under way at once. (all_reduce and reduce do all of that in one call of the core: pipelined_reduce.py.)

The network carries what the other hosts need, once per host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from ctypes import c_void_p
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from ... import native
from ...call import ANY_COUNT, Op, changed
from ...native import lib
from ..cuts import chunks, evenly
from ..disagreement import AT_THE_ROOT
from ..trouble import Trouble
from .balance import BALANCE_BYTES, fit, together
from .flat_exchange import HEADER_BYTES, fingerprint
from .layout import Reduction
from .link import DATA, ROUND, Buffer
from .local_call import LocalCall

if TYPE_CHECKING:
    from ctypes import Array

    from mpi4py.MPI import Request

    from ...call import Buffer as Tensor
    from ...call import Call
    from .. import LocalTransport
    from .algorithm import Limits
    from .balance import Balances
    from .flat_exchange import FlatExchange
    from .health import Health
    from .layout import Hosts, Step
    from .link import MpiLink
    from .pipelined_reduce import PipelinedReduce

    Span = tuple[int, int]  # address, bytes


_DEPTH = 3  # chunks under way
_LINE = 64  # bytes of a cache line: parts begin at multiples
_VERDICT = 16  # bytes, a multiple of those of any item
_ALIKE = -2
_SENDS = 64  # sends under way of a call that sends straight to the ranks it is for


class Group(Protocol):
    """What a collective in two levels asks of the transport."""

    rank: int
    size: int
    hosts: Hosts
    link: MpiLink
    local: LocalTransport
    health: Health
    chunk: int
    pipelined: PipelinedReduce
    limits: Limits | None
    flat: FlatExchange  # there where `limits` is
    balances: Balances
    local_calls: dict[tuple[int, int], LocalCall]
    told: list[tuple[list[Request], Buffer]]


class TwoLevelCollective:
    """One collective under way on one rank."""

    def __init__(self, transport: Group, number: int, call: Call, deadline: float) -> None:
        self.t, self.number, self.call, self.deadline = transport, number, call, deadline
        self.hosts, self.link = transport.hosts, transport.link
        self.item = call.dtype.item_bytes
        self.width = len(self.hosts.here)
        self.carrier = self.hosts.local < self.hosts.carriers
        self.outer = 0
        self.sent: deque[tuple[list[Request], int]] = deque()
        self.received: list[list[Request]] = []  # all of the call
        self.lengths: list[int] = []  # of an uneven call: bytes of each message that `_arrive` is to wait for
        self.kept: list[object] = []  # memory of its own that they read or write

    @property
    def uneven(self) -> bool:
        """Whether parts may differ."""
        return self.call.count == ANY_COUNT or self.call.op in AT_THE_ROOT

    def withdraw(self) -> None:
        """After `run` has raised: MPI writes into none of the call's memory any more, or that is kept."""
        requests, keep = [r for requests, _ in self.sent for r in requests], (self.call, self.kept)
        if requests:
            self.link.give_up(requests, keep)
        self.link.withdraw([r for requests in self.received for r in requests], keep)

    def run(self) -> None:
        """Moves the data, once the ranks have agreed that they call the same."""
        {
            Op.all_reduce: self._reduction,
            Op.reduce: self._reduction,
            Op.broadcast: self._broadcast,
            Op.all_gather: self._all_gather,
            Op.reduce_scatter: self._reduce_scatter,
            Op.all_to_all: self._all_to_all,
            Op.gather: self._gather,
            Op.scatter: self._scatter,
        }[self.call.op]()
        self._flush()

    # --- agreement

    def reject(self) -> None:
        """Tells the others that this rank has refused the call."""
        if self.t.limits is None:
            raise Trouble(native.MISMATCH, self.t.rank)
        self.t.told = [told for told in self.t.told if not self.link.MPI.Request.Testall(told[0])]
        told = self.t.flat.tell(self.number, self.call)
        self.link.settle(told[0])
        self.t.told.append(told)

    def agree(self) -> None:
        """Inside each host the core compares fingerprints; between the hosts, their first ranks do, in
        the rounds of a dissemination barrier (Hensgen, Finkel, Manber 1988): equal to a neighbour that
        is equal to its own is equal to all. Of an uneven call these rounds also carry the balances of the hosts
        (balance.py), instead of comparing counts: after each, a host knows those of twice as many before it."""
        mine = fingerprint(self.number, changed(self.call, count=ANY_COUNT) if self.uneven else self.call)
        self.outer = int.from_bytes(blake2b(mine, digest_size=8).digest(), "little")
        balances = [self._host_balance()] if self.uneven else []
        if not balances:
            self._local(Op.barrier, [], [], count=0)
        leads, told = self.hosts.local == 0, Buffer(_VERDICT)
        if leads:
            told.memory[:8] = self._in_rounds(mine, balances).to_bytes(8, "little", signed=True)
        span = [(told.address, _VERDICT)]
        self._local(Op.broadcast, span * leads, span * (not leads), root=0, count=_VERDICT // self.item)
        peer = int.from_bytes(told.memory[:8], "little", signed=True)
        if peer != _ALIKE:
            raise Trouble(native.MISMATCH, peer)

    def _in_rounds(self, mine: bytes, balances: list[bytes]) -> int:
        """_ALIKE; or a rank that calls another collective; or -1 where parts do not fit."""
        ranks, me = [h[0] for h in self.hosts.ranks], self.hosts.mine
        most = HEADER_BYTES + BALANCE_BYTES * len(ranks)
        out, into = Buffer(most), Buffer(most)
        self.kept += out, into
        out.memory[: len(mine)] = mine
        step = 1
        while step < len(ranks):
            to, source = ranks[(me + step) % len(ranks)], ranks[me - step]
            said = b"".join(balances[: len(ranks) - step])
            end = HEADER_BYTES + len(said)
            out.memory[HEADER_BYTES:end] = said
            self._send(out.address, end, to, ROUND)
            self._wait(self._receive(into.address, most, source, ROUND) + self.sent.popleft()[0], [source, to])
            if into.memory[: len(mine)] != mine:
                return source
            balances += [bytes(into.memory[at : at + BALANCE_BYTES]) for at in range(HEADER_BYTES, end, BALANCE_BYTES)]
            step *= 2
        return _ALIKE if fit(balances) else -1

    def _host_balance(self) -> bytes:
        """Returns the sum of the balances of this host's ranks."""
        here = Buffer(BALANCE_BYTES * (self.width + 1))
        own, *all_here = ((here.address + at, BALANCE_BYTES) for at in range(0, here.nbytes, BALANCE_BYTES))
        here.memory[:BALANCE_BYTES] = self.t.balances.of(self.call)
        self._local(Op.all_gather, [own], all_here, count=BALANCE_BYTES // self.item)
        return together(here.memory[at : at + BALANCE_BYTES] for at in range(BALANCE_BYTES, here.nbytes, BALANCE_BYTES))

    # --- steps

    def _local(
        self,
        op: Op,
        inputs: Sequence[Span],
        outputs: Sequence[Span],
        root: int = -1,
        step: Step | None = None,
        count: int = ANY_COUNT,
    ) -> None:
        """Carries out a collective of this host's ranks."""
        many = len(inputs), len(outputs)
        local = self.t.local_calls.get(many) or self.t.local_calls.setdefault(many, LocalCall(*many))
        what = self.call, self.deadline, self.number, self.outer
        failure = self.t.local.attempt(local.fill(*what, op, step, root, count, inputs, outputs))
        if failure is not None:
            raise self.t.health.trouble(failure)

    # Requests are in the call's own lists from the moment they are made: none is lost to an exception.

    def _wait(self, requests: list[Request], peers: Sequence[int]) -> None:
        self.link.wait(requests, self.deadline, peers, (self.kept, self.call))

    def _arrive(self, receives: list[Request], peers: Sequence[int]) -> None:
        """Waits for all messages that were asked for since the last time."""
        lengths, self.lengths = self.lengths, []
        self.link.wait(receives, self.deadline, peers, (self.kept, self.call), lengths)

    def _receive(self, address: int, nbytes: int, peer: int, tag: int = DATA) -> list[Request]:
        if self.uneven and tag == DATA:
            self.lengths += self.link.lengths(nbytes)
        requests: list[Request] = []
        self.received.append(requests)
        return self.link.receive(address, nbytes, peer, tag, requests)

    def _send(self, address: int, nbytes: int, peer: int, tag: int = DATA) -> None:
        """Sends from memory that stays as it is until the end of the call."""
        requests: list[Request] = []
        self.sent.append((requests, peer))
        self.link.send(address, nbytes, peer, tag, requests)
        while len(self.sent) > _SENDS:
            self._wait(*self._oldest())

    def _oldest(self) -> tuple[list[Request], list[int]]:
        requests, peer = self.sent.popleft()
        return requests, [peer]

    def _flush(self) -> None:
        while self.sent:
            self._wait(*self._oldest())

    def _combine(self, target: int, sources: Array[c_void_p], nbytes: int, step: Step) -> None:
        lib.c10d_reduce(
            self.call.dtype.code, step.redop, target, sources, len(sources), nbytes // self.item, step.factors
        )

    def _reduction(self) -> None:
        root = self.hosts.of_rank(self.call.root) if self.call.op is Op.reduce else None
        self.t.pipelined.reduce(self.number, self.call, self.deadline, self.outer, root)

    # --- broadcast: from host to host in a chain, the carriers each their part of a chunk

    def _broadcast(self) -> None:
        call, hosts = self.call, self.hosts
        host, index = hosts.of_rank(call.root)
        region = (call.inputs or call.outputs)[0]
        base, total = region.data_ptr(), region.nbytes
        count = len(hosts.ranks)
        position = (hosts.mine - host) % count
        before = (hosts.mine - 1) % count
        after = (hosts.mine + 1) % count if position < count - 1 else None
        ranges = chunks(total, self.t.chunk * hosts.carriers)
        cuts = [evenly(hi - lo, hosts.carriers, _LINE) for lo, hi in ranges]

        def own_part(k: int) -> Span:
            j = hosts.local
            return base + ranges[k][0] + cuts[k][j], cuts[k][j + 1] - cuts[k][j]

        arriving: deque[list[Request]] = deque()
        for k in range(len(ranges) + _DEPTH):
            if k < len(ranges) and position and self.carrier:
                arriving.append(self._receive(*own_part(k), hosts.partner(before, hosts.local)))
            at = k - _DEPTH if position else k
            if not 0 <= at < len(ranges):
                continue
            lo, hi = ranges[at]
            if not position:
                mine = [(base + lo, hi - lo)]
                self._local(
                    Op.broadcast,
                    mine if hosts.local == index else [],
                    [] if hosts.local == index else mine,
                    root=index,
                    count=(hi - lo) // self.item,
                )
            elif self.carrier:
                self._wait(arriving.popleft(), [hosts.partner(before, hosts.local)])
            if after is not None and self.carrier:
                self._send(*own_part(at), hosts.partner(after, hosts.local))
            if position:
                cut = cuts[at]
                parts = [
                    (
                        base + lo + cut[min(j, hosts.carriers)],
                        cut[min(j + 1, hosts.carriers)] - cut[min(j, hosts.carriers)],
                    )
                    for j in range(self.width)
                ]
                self._local(Op.all_gather, [parts[hosts.local]], parts)

    # --- all_gather: each rank's part once to every other host, then inside

    def _all_gather(self) -> None:
        call, hosts, width = self.call, self.hosts, self.width
        mine, outputs = call.inputs[0], call.outputs
        peers = [rank for h in hosts.others for rank in hosts.ranks[h][hosts.local :: width]]
        receives = self._receive_parts(peers)
        for h in hosts.others:
            self._send(mine.data_ptr(), mine.nbytes, hosts.partner(h, hosts.local))
        self._local(Op.all_gather, [(mine.data_ptr(), mine.nbytes)], self._spans(hosts.here, outputs))
        self._arrive(receives, peers)
        for h in hosts.others:
            for first in range(0, len(hosts.ranks[h]), width):
                ranks = hosts.ranks[h][first : first + width]
                parts = self._spans(ranks, outputs) + [(mine.data_ptr(), 0)] * (width - len(ranks))
                self._local(Op.all_gather, [parts[hosts.local]], parts)

    @staticmethod
    def _spans(ranks: Sequence[int], tensors: Sequence[Tensor]) -> list[Span]:
        return [(tensors[r].data_ptr(), tensors[r].nbytes) for r in ranks]

    # --- reduce_scatter: the hosts' sums of every part go to the rank whose part it is

    def _reduce_scatter(self) -> None:
        call, hosts, width = self.call, self.hosts, self.width
        steps = Reduction.of(call.dtype, call.redop, self.t.size)
        out = call.outputs[0]
        most = max(t.nbytes for t in call.inputs)
        for lo, hi in chunks(most, self.t.chunk) or [(0, 0)]:

            def cut(tensor: Tensor) -> Span:
                return tensor.data_ptr() + min(lo, tensor.nbytes), max(0, min(hi, tensor.nbytes) - lo)

            own = cut(out)
            partial = {h: Buffer(max(64, own[1])) for h in range(len(hosts.ranks))}
            self.kept.append(partial)
            receives, peers = [], []
            for h in hosts.others:
                source = hosts.partner(h, hosts.local)
                receives += self._receive(partial[h].address, own[1], source)
                peers.append(source)
            for h in hosts.others:
                for first in range(0, len(hosts.ranks[h]), width):
                    ranks = hosts.ranks[h][first : first + width]
                    inputs = [cut(call.inputs[r]) for r in ranks] + [(own[0], 0)] * (width - len(ranks))
                    staged = Buffer(max(64, inputs[hosts.local][1]))
                    self._local(
                        Op.reduce_scatter, inputs, [(staged.address, inputs[hosts.local][1])], step=steps.inside
                    )
                    if hosts.local < len(ranks):
                        self.kept.append(staged)
                        self._send(staged.address, inputs[hosts.local][1], ranks[hosts.local])
            self._local(
                Op.reduce_scatter,
                [cut(call.inputs[r]) for r in hosts.here],
                [(partial[hosts.mine].address, own[1])],
                step=steps.inside,
            )
            self._arrive(receives, peers)
            if own[1]:
                addresses = [partial[h].address for h in range(len(hosts.ranks))]
                self._combine(own[0], (c_void_p * len(addresses))(*addresses), own[1], steps.between)
            self._flush()
            self.kept.clear()

    # --- what goes straight to the rank it is for

    def _receive_parts(self, ranks: Sequence[int]) -> list[Request]:
        spans = zip(self._spans(ranks, self.call.outputs), ranks)
        return [request for span, rank in spans for request in self._receive(*span, rank)]

    def _send_parts(self, ranks: Sequence[int]) -> None:
        for span, rank in zip(self._spans(ranks, self.call.inputs), ranks):
            self._send(*span, rank)

    def _all_to_all(self) -> None:
        call, hosts = self.call, self.hosts
        remote = [r for h in hosts.others for r in hosts.ranks[h]]
        receives = self._receive_parts(remote)
        self._send_parts(remote)
        self._local(Op.all_to_all, self._spans(hosts.here, call.inputs), self._spans(hosts.here, call.outputs))
        self._arrive(receives, remote)

    def _gather(self) -> None:
        call, hosts = self.call, self.hosts
        host, index = hosts.of_rank(call.root)
        mine = call.inputs[0]
        if host != hosts.mine:
            self._send(mine.data_ptr(), mine.nbytes, call.root)
            return
        root = hosts.local == index
        remote = [r for h in hosts.others for r in hosts.ranks[h]] if root else []
        receives = self._receive_parts(remote)
        self._local(
            Op.gather,
            [(mine.data_ptr(), mine.nbytes)],
            self._spans(hosts.here, call.outputs) if root else [],
            root=index,
            count=call.count,
        )
        self._arrive(receives, remote)

    def _scatter(self) -> None:
        call, hosts = self.call, self.hosts
        host, index = hosts.of_rank(call.root)
        mine = call.outputs[0]
        if host != hosts.mine:
            self._arrive(self._receive(mine.data_ptr(), mine.nbytes, call.root), [call.root])
            return
        root = hosts.local == index
        if root:
            self._send_parts([r for h in hosts.others for r in hosts.ranks[h]])
        self._local(
            Op.scatter,
            self._spans(hosts.here, call.inputs) if root else [],
            [(mine.data_ptr(), mine.nbytes)],
            root=index,
            count=call.count,
        )
