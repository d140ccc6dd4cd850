"""Collectives through staging memory that the ranks of a host open in each other's processes: a rank puts what the
others need into its own, and takes what it needs from theirs.

Data moves in rounds, numbered from 0 over the life of the group, alike on all ranks. In round k each rank puts data
into half k % 2 of its staging memory; its host waits until its stream has done so; all ranks meet; each takes what it
needs from the others' halves. So after the meeting every stream may take. A rank's stream takes in round k before it
puts in round k + 1; so after the meeting of round k + 1 nobody reads the half of round k any more. No stream and no
kernel waits for another process: nothing that becomes of one can hold it, and they may run one after the other.

Reductions read the sources in rank order, a rank's own input where it lies. Only where each rank has a GPU of its own
do some collectives take the fused kernels, which order themselves: there the hosts do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...call import AT_ROOT, REDUCING, SHAPES, Op, Region, changed
from ..cuts import evenly
from . import algorithm
from .algorithm import HALVES, Way
from .kernels import PREMUL_SUM, Job

if TYPE_CHECKING:
    from ...call import Buffer, Call
    from .fused import Fused
    from .host_exchange import Place
    from .in_place import InPlace
    from .peers import Peers
    from .staged import StagedCollectives
    from .stream_op import StreamOp


_ALIGN = 256


class SharedCollectives:
    """``k``: the number of the next round; ``put``: an event behind what was put last; ``staged``: what goes through
    host memory. One collective at a time: ``call``; ``left()``: the seconds it still has; ``agreed``: an Agreement,
    once the ranks have met; ``awaited``: whether what this rank has put is there."""

    def __init__(self, place: Place, peers: Peers, staged: StagedCollectives) -> None:
        self.cpu, self.driver, self.config = place.cpu, place.driver, place.config
        self.stream, self.came = place.stream, place.came
        self.peers, self.staged = peers, staged
        self.me, self.n, self.half = peers.rank, peers.size, peers.facts.half
        self.k = 0
        self.put = self.driver.take_event()
        self.call: Any = None
        self.agreed: Any = None

    def run(self, call: Call, left: Callable[[], float]) -> None:
        """Enqueues it all. Waits for the other ranks, and for what this one has put."""
        facts = self.peers.facts
        way = algorithm.choose(call, facts, self.config)
        if way is None:
            way = algorithm.uneven(self.cpu.agree(call, left()).sizes or (), facts, self.config)
        if way is Way.THROUGH_HOST:
            return self.staged.run(call, left)
        self.call, self.left, self.agreed, self.awaited = call, left, None, True
        try:
            self.run_here(way)
        finally:
            self.call = None

    def run_here(self, way: Way) -> None:
        """By the GPU."""
        if way is Way.IN_PLACE:
            if cast("InPlace", self.peers.in_place).run(self.call, self._meet, self._factors, self.left):
                return
            # Not this time, or never again; collectives of the hosts have come in between.
            self.agreed = None
            way = algorithm.rounds(self.call, self.peers.facts, self.config)
        if way is Way.ALONE:
            self._meet()
            self._alone()
        elif way is Way.FUSED:
            self._fused()
        elif way is Way.TWO_SHOT:
            self._two_shot()
        else:
            self._move(self.call)
            if self.agreed is None:  # nothing to move
                self._meet()

    def close(self) -> None:
        """The stream is idle. The memory is that of the Peers."""
        self.staged.close()
        self.driver.give_event(self.put)

    # --- rounds

    def _meet(self) -> None:
        if not self.awaited:
            self.came(self.call, self.put, self.left(), "what was queued for it, or before")
            self.awaited = True
        if self.agreed is None:
            self.agreed = self.cpu.agree(self.call, self.left())
        else:
            self.cpu.meet(self.call, self.agreed.number, self.left())

    def _put(self, put: Callable[[int], None]) -> list[int]:
        """``put(base)`` into this rank's half. Where the round's halves begin, of each rank's staging memory."""
        bases = self._bases(self.k)
        self.k += 1
        put(bases[self.me])
        self.driver.record(self.put, self.stream)
        self.awaited = False
        return bases

    def _bases(self, k: int) -> list[int]:
        at = (k % HALVES) * self.half
        return [self.peers.staging[r] + at for r in range(self.n)]

    # --- work on the stream

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes > 0 and target != source:
            self.driver.copy(self.stream, target, source, nbytes)

    def _combine(self, targets: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
        if nbytes > 0:
            call = self.call
            job = Job(sources, targets, nbytes // call.dtype.item_bytes)
            self.driver.kernels.reduce(self.stream, call.dtype, call.redop, self._factors(), [job])

    def _factors(self) -> list[float]:
        return self.agreed.factors if self.call.redop == PREMUL_SUM else []

    def _alone(self) -> None:
        call = self.call
        if not call.inputs or not call.outputs:
            return
        source, target = call.inputs[0], call.outputs[0]
        if call.op in REDUCING:
            self._combine([target.data_ptr()], [source.data_ptr()], source.nbytes)
        else:
            self._copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    def _fused(self) -> None:
        p2p, stream_op = cast("Fused", self.peers.fused).p2p, cast("StreamOp", self.call.stream_op)
        p2p.prepare(self.call)
        stream_op.number = self.cpu.announce(self.call, self.left())
        p2p.run(self.stream, self.call, stream_op.number)

    # --- through staging memory

    def _two_shot(self) -> None:
        """Each rank reduces one slice of an all_reduce, then all get them all."""
        call, item = self.call, self.call.dtype.item_bytes
        cut = evenly(call.inputs[0].nbytes, self.n, _ALIGN)

        def slices(tensor: Buffer) -> list[Region]:
            base = tensor.data_ptr()
            return [Region(base + low, high - low, (high - low) // item) for low, high in zip(cut, cut[1:])]

        results = slices(call.outputs[0])
        mine = [results[self.me]]
        self._move(changed(call, op=Op.reduce_scatter, inputs=slices(call.inputs[0]), outputs=mine))
        self._move(changed(call, op=Op.all_gather, inputs=mine, outputs=results))

    def _move(self, call: Call) -> None:
        """A rank puts its input whole, or the parts of it that are for each rank, every one into a slot; and takes what
        is for it: to copy each, or to reduce all. A part is as long as it is on every rank, or the ranks know the
        longest when they have met."""
        shape, me = SHAPES[call.op], self.me
        slot = self.half // self.n // _ALIGN * _ALIGN if shape.from_each else 0  # bytes that a half has for each rank
        step = slot or self.half
        givers = [call.root] if shape.reads == AT_ROOT else range(self.n)
        puts = bool(call.inputs) and not (shape.writes == AT_ROOT and me == call.root)  # who alone takes reads its own
        known = call.op is not Op.all_to_all
        longest = max((t.nbytes for t in [*call.inputs, *call.outputs]), default=0)
        own = call.inputs[me if shape.from_each else 0] if call.inputs else None
        if own is not None and call.outputs and not shape.reduces:
            self._copy(call.outputs[me if shape.to_each else 0].data_ptr(), own.data_ptr(), own.nbytes)
        at = 0

        def put(base: int) -> None:
            for r, part in enumerate(call.inputs if puts else ()):
                if r != me or not slot:
                    self._copy(base + r * slot, part.data_ptr() + at, min(step, part.nbytes - at))

        def take(bases: Sequence[int]) -> None:
            if not call.outputs:
                return
            sources, output = [b + me * slot for b in bases], call.outputs[0]
            if shape.reduces:
                sources[me] = own.data_ptr() + at if own is not None else 0
                self._combine([output.data_ptr() + at], sources, min(step, output.nbytes - at))
                return
            for r in givers:
                if r != me:
                    output = call.outputs[r if shape.to_each else 0]
                    self._copy(output.data_ptr() + at, sources[r], min(step, output.nbytes - at))

        while at < longest or not known:
            bases = self._put(put)
            self._meet()
            take(bases)
            if not known:
                known, longest = True, self._longest_sent()
            at += step

    def _longest_sent(self) -> int:
        """Bytes of the longest part that any rank sends another."""
        return max(
            (size for r, (sends, _) in enumerate(self.agreed.sizes) for to, size in enumerate(sends) if to != r),
            default=0,
        )
