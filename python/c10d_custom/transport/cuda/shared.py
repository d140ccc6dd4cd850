"""Collectives through staging memory that the ranks of a host open in each other's processes: a rank puts what
the others need into its own, and takes what it needs from theirs (order.py says in what order).

Larger ones need no staging memory where ranks share a GPU and its tensors can be mapped (in_place.py).

Nothing waits in a kernel: kernels of different processes on one GPU may run one after the other. Reductions
read the sources in rank order, a rank's own input where it lies. Only where each rank has a GPU of its own does
all_reduce take the fused kernels.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...call import ANY_COUNT, REDUCING, Op
from ...dtypes import RedOp
from ..cuts import evenly
from .kernels import Job
from .order import HALVES
from .stream_op import poll

if TYPE_CHECKING:
    from ...call import Buffer, Call
    from ...config import Config
    from ...errors import CustomBackendError
    from ..base import LocalTransport
    from .driver import Driver
    from .fused import Fused
    from .in_place import InPlace
    from .peers import Peers


_ALIGN = 256
_TURNS = 16  # by how much more is one-shot where one step of kernels less saves every rank a turn
_AVG, _PREMUL_SUM = int(RedOp.AVG), int(RedOp.PREMUL_SUM)


class SharedCollectives:
    """``k``: the number of the next round; ``readers``: the ranks that read the halves last; ``late(call, what)``: the
    error of one for which the GPU took too long. One collective at a time."""

    def __init__(
        self,
        cpu: LocalTransport,
        driver: Driver,
        peers: Peers,
        config: Config,
        stream: int,
        late: Callable[[Call, str], CustomBackendError],
    ) -> None:
        self.cpu, self.driver, self.peers, self.config, self.stream = cpu, driver, peers, config, stream
        self.late = late
        self.k = 0
        self.readers: list[Sequence[int]] = [()] * HALVES

    def run(self, call: Call, left: Callable[[], float]) -> None:
        """Enqueues it all; ``left()``: the seconds it still has. Waits for the other ranks, and where the order says so
        for what this one has enqueued before."""
        _Run(self, call, left).run()

    def in_place_for(self, call: Call) -> InPlace | None:
        """What tries it in place; None: nothing does. Alike on all ranks that call alike."""
        in_place = self.peers.in_place
        return in_place if in_place is not None and in_place.takes(call, self.config.cuda_in_place_bytes) else None

    def let_go(self) -> None:
        self.peers.let_go(self.k)

    def close(self) -> None:
        """Its memory is that of the Peers."""


class _Run:
    def __init__(self, group: SharedCollectives, call: Call, left: Callable[[], float]) -> None:
        self.g, self.call, self.left = group, call, left
        self.driver, self.stream, self.cpu = group.driver, group.stream, group.cpu
        self.peers = group.peers
        self.order = group.peers.order  # None where there is one rank only
        self.me, self.n, self.half = group.peers.rank, group.peers.size, group.peers.half
        self.agreed: Any = None  # an Agreement, once the ranks have met

    def run(self) -> None:
        if self.n == 1:
            self._meet()
            return self._alone()
        if self.call.op is Op.all_reduce and self.peers.fused is not None:
            return self._all_reduce_fused()
        if self._in_place():
            return None
        {
            Op.all_reduce: self._all_reduce,
            Op.reduce: self._reduce,
            Op.broadcast: self._broadcast,
            Op.all_gather: self._all_gather,
            Op.reduce_scatter: self._reduce_scatter,
            Op.all_to_all: self._all_to_all,
            Op.gather: self._gather,
            Op.scatter: self._scatter,
        }[self.call.op]()
        if self.agreed is None:  # nothing to move
            self._meet()

    def _in_place(self) -> bool:
        in_place = self.g.in_place_for(self.call)
        if in_place is None:
            return False
        if in_place.run(self.call, self.stream, self._meet, self._factor, self.left, self.g.late):
            return True
        self.agreed = None  # collectives of the hosts have come in between
        return False

    # --- rounds

    def _meet(self) -> None:
        if self.order is not None:
            self._reach()
        if self.agreed is None:
            self.agreed = self.cpu.agree(self.call, self.left())
        elif self.order.meets:
            self.cpu.meet(self.call, self.agreed.number, self.left())

    def _reach(self) -> None:
        until, broken = time.monotonic() + self.left(), self.cpu.broken
        if not poll(self.order.reached, until, broken) and not broken():  # else the meeting says why
            raise self.g.late(self.call, "what was queued for it, or before")

    def _round(
        self,
        put: Callable[[int], None],
        take: Callable[[Sequence[int]], None],
        sources: Iterable[int] | None = None,
        readers: Sequence[int] | None = None,
    ) -> None:
        """``put(base)`` into this rank's half; ``take(bases)`` from the others'. ``sources``: the ranks that put;
        ``readers``: those that take. Default: all. Every rank must say the same."""
        k = self._put(put, readers)
        self._meet()
        self._take(k, take, sources, readers)

    def _put(self, put: Callable[[int], None], readers: Sequence[int] | None = None) -> int:
        g = self.g
        k, g.k = g.k, g.k + 1
        self.order.reuse(self.stream, k, g.readers[k % HALVES])
        g.readers[k % HALVES] = range(self.n) if readers is None else readers
        put(self._bases(k)[self.me])
        self.order.publish(self.stream, k)
        return k

    def _take(
        self,
        k: int,
        take: Callable[[Sequence[int]], None],
        sources: Iterable[int] | None = None,
        readers: Sequence[int] | None = None,
    ) -> None:
        if readers is None or self.me in readers:
            self.order.arrive(self.stream, k, range(self.n) if sources is None else sources)
        take(self._bases(k))
        self.order.release(self.stream, k)

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
            self.driver.reduce(self.stream, call.dtype, call.redop, self._factor(), [job])

    def _factor(self) -> Any:
        redop = self.call.redop
        return float(self.n) if redop == _AVG else self.agreed.factors if redop == _PREMUL_SUM else None

    def _with_own(self, sources: Sequence[int], own: int) -> list[int]:
        return [own if r == self.me else s for r, s in enumerate(sources)]

    def _alone(self) -> None:
        call = self.call
        if not call.inputs or not call.outputs:
            return
        source, target = call.inputs[0], call.outputs[0]
        if call.op in REDUCING:
            self._combine([target.data_ptr()], [source.data_ptr()], source.nbytes)
        else:
            self._copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    # --- reductions

    def _all_reduce_fused(self) -> None:
        fused = cast("Fused", self.peers.fused)
        fused.prepare(self.call)
        self._meet()
        fused.all_reduce(self.stream, self.call, self.left())

    def _all_reduce(self) -> None:
        call = self.call
        source, target, total = call.inputs[0].data_ptr(), call.outputs[0].data_ptr(), call.inputs[0].nbytes
        one_shot = total <= min(self.g.config.cuda_one_shot_bytes * (_TURNS if self.peers.turns else 1), self.half)
        for at in range(0, total, self.half):
            step = self._one_shot if one_shot else self._two_shot
            step(source + at, target + at, min(self.half, total - at))

    def _one_shot(self, source: int, target: int, nbytes: int) -> None:
        """Every rank reads every rank's input."""
        self._round(
            lambda base: self._copy(base, source, nbytes),
            lambda bases: self._combine([target], self._with_own(bases, source), nbytes),
        )

    def _two_shot(self, source: int, target: int, nbytes: int) -> None:
        """Each rank reduces one slice of it; then each copies the others' results. A slice lies at its own
        offset in the staging memory, in both rounds."""
        cut = evenly(nbytes, self.n, _ALIGN)
        slices = [(cut[r], cut[r + 1] - cut[r]) for r in range(self.n)]
        low, size = slices[self.me]

        def put(base: int) -> None:
            for r, (at, length) in enumerate(slices):
                if r != self.me:
                    self._copy(base + at, source + at, length)

        first = self._put(put)
        self._meet()
        # The kernel both takes in the first round and puts in the second.
        self.order.arrive(self.stream, first, range(self.n))
        bases = self._bases(first)
        second = self._put(
            lambda base: self._combine(
                [target + low, base + low], self._with_own([b + low for b in bases], source + low), size
            )
        )
        self.order.release(self.stream, first)
        self._meet()

        def take(bases: Sequence[int]) -> None:
            for r, (at, length) in enumerate(slices):
                if r != self.me:
                    self._copy(target + at, bases[r] + at, length)

        self._take(second, take)

    def _reduce(self) -> None:
        call, root = self.call, self.call.root
        source, total = call.inputs[0].data_ptr(), call.inputs[0].nbytes
        for at in range(0, total, self.half):
            nbytes = min(self.half, total - at)

            def put(base: int, at: int = at, nbytes: int = nbytes) -> None:
                if self.me != root:
                    self._copy(base, source + at, nbytes)

            def take(bases: Sequence[int], at: int = at, nbytes: int = nbytes) -> None:
                if self.me == root:
                    self._combine([call.outputs[0].data_ptr() + at], self._with_own(bases, source + at), nbytes)

            self._round(put, take, *self._to(root))

    def _reduce_scatter(self) -> None:
        call, slot = self.call, self._slot()
        own, output = call.inputs[self.me].data_ptr(), call.outputs[0]
        longest = max(t.nbytes for t in call.inputs)
        for at in range(0, longest, slot):

            def take(bases: Sequence[int], at: int = at) -> None:
                sources = [b + self.me * slot for b in bases]
                self._combine(
                    [output.data_ptr() + at], self._with_own(sources, own + at), min(slot, output.nbytes - at)
                )

            self._round(functools.partial(self._put_parts, slot=slot, at=at), take)

    # --- what only moves

    def _broadcast(self) -> None:
        call, root = self.call, self.call.root
        region = (call.inputs or call.outputs)[0]
        for at in range(0, region.nbytes, self.half):
            nbytes = min(self.half, region.nbytes - at)

            def put(base: int, at: int = at, nbytes: int = nbytes) -> None:
                if self.me == root:
                    self._copy(base, region.data_ptr() + at, nbytes)

            def take(bases: Sequence[int], at: int = at, nbytes: int = nbytes) -> None:
                if self.me != root:
                    self._copy(region.data_ptr() + at, bases[root], nbytes)

            self._round(put, take, *self._from(root))

    def _all_gather(self) -> None:
        call = self.call
        mine, outputs = call.inputs[0], call.outputs
        longest = max(t.nbytes for t in outputs)
        self._copy_own(outputs[self.me], mine)
        for at in range(0, longest, self.half):

            def put(base: int, at: int = at) -> None:
                self._copy(base, mine.data_ptr() + at, min(self.half, mine.nbytes - at))

            def take(bases: Sequence[int], at: int = at) -> None:
                for r, output in enumerate(outputs):
                    if r != self.me:
                        self._copy(output.data_ptr() + at, bases[r], min(self.half, output.nbytes - at))

            self._round(put, take)

    def _all_to_all(self) -> None:
        """Ranks know the sizes of their own parts only, until they meet."""
        call, slot, at = self.call, self._slot(), 0
        self._copy_own(call.outputs[self.me], call.inputs[self.me])
        while True:

            def take(bases: Sequence[int], at: int = at) -> None:
                for r, output in enumerate(call.outputs):
                    if r != self.me:
                        self._copy(output.data_ptr() + at, bases[r] + self.me * slot, min(slot, output.nbytes - at))

            self._round(functools.partial(self._put_parts, slot=slot, at=at), take)
            at += slot
            if at >= self._longest():
                return

    def _gather(self) -> None:
        call, root = self.call, self.call.root
        mine = call.inputs[0]
        if self.me == root:
            self._copy_own(call.outputs[root], mine)
        for at in range(0, mine.nbytes, self.half):
            nbytes = min(self.half, mine.nbytes - at)

            def put(base: int, at: int = at, nbytes: int = nbytes) -> None:
                if self.me != root:
                    self._copy(base, mine.data_ptr() + at, nbytes)

            def take(bases: Sequence[int], at: int = at, nbytes: int = nbytes) -> None:
                for r, output in enumerate(call.outputs):
                    if r != root:
                        self._copy(output.data_ptr() + at, bases[r], nbytes)

            self._round(put, take, *self._to(root))

    def _scatter(self) -> None:
        call, root, slot = self.call, self.call.root, self._slot()
        output = call.outputs[0]
        if self.me == root:
            self._copy_own(output, call.inputs[root])
        for at in range(0, output.nbytes, slot):

            def take(bases: Sequence[int], at: int = at) -> None:
                if self.me != root:
                    self._copy(output.data_ptr() + at, bases[root] + self.me * slot, min(slot, output.nbytes - at))

            self._round(functools.partial(self._put_parts, slot=slot, at=at), take, *self._from(root))

    # --- parts

    def _slot(self) -> int:
        """Bytes that a half has for each rank."""
        return self.half // self.n // _ALIGN * _ALIGN

    def _put_parts(self, base: int, slot: int, at: int) -> None:
        for r, part in enumerate(self.call.inputs):
            if r != self.me:
                self._copy(base + r * slot, part.data_ptr() + at, min(slot, part.nbytes - at))

    def _copy_own(self, output: Buffer, mine: Buffer) -> None:
        self._copy(output.data_ptr(), mine.data_ptr(), mine.nbytes)

    def _longest(self) -> int:
        """Bytes of the longest part that any rank sends another."""
        if self.call.count != ANY_COUNT:
            return max(t.nbytes for t in self.call.inputs)
        return max(
            (size for r, (sends, _) in enumerate(self.agreed.sizes) for to, size in enumerate(sends) if to != r),
            default=0,
        )

    def _to(self, root: int) -> tuple[list[int], list[int]]:
        """(sources, readers) of what goes to the root."""
        return [r for r in range(self.n) if r != root], [root]

    def _from(self, root: int) -> tuple[list[int], list[int]]:
        return [root], [r for r in range(self.n) if r != root]
