"""Collectives by fused kernels, for ranks that each have a GPU of their own and reach each other's memory: the
host's side of backend/cuda/p2p.h, which has the protocol."""

from __future__ import annotations

import ctypes as c
import functools
import itertools
import operator
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...call import REDUCING, Op
from ...threads import threading
from .algorithm import FLAGGED_BYTES, FUSED_RANKS, fused_all_reduce
from .host_exchange import BYTES
from .kernels import COPY, PREMUL_SUM

if TYPE_CHECKING:
    from ...call import Call
    from ...dtypes import DType
    from .kernels import Kernels


MAX_RANKS, MAX_BLOCKS = FUSED_RANKS, 64
TIMEOUT, MISMATCH, ABORTED, PEER, AT_ONCE = range(1, 6)  # Kind
_SIGNALS = 128 + 2 * MAX_BLOCKS * MAX_RANKS * 16  # bytes: p2p::Pad
_WORDS = FLAGGED_BYTES // 4  # kWords
RECORD_BYTES = 24
OWNER = 24  # where in a pad: u32, not 0 while a kernel of its rank runs
ALL_REDUCE = "Flagged", "OneShot", "TwoShot"
_ALGORITHMS = {Op.all_gather: "AllGather", Op.reduce_scatter: "ReduceScatter", Op.broadcast: "Broadcast"}
MOVED = BYTES, COPY  # of kernels that reduce nothing


def pad_bytes(ranks: int) -> int:
    return _SIGNALS + 2 * ranks * _WORDS * 8


class Arguments(c.Structure):
    """p2p::Arguments."""

    _fields_ = [
        ("pad", c.c_uint64 * MAX_RANKS),
        ("staging", c.c_uint64 * MAX_RANKS),
        *((name, c.c_uint64) for name in ("input", "output")),
        ("part", c.c_uint64 * MAX_RANKS),
        *((name, c.c_uint64) for name in ("bytes", "half", "slice", "record", "timeout_ns")),
        ("factor", c.c_double),
        *((name, c.c_uint32) for name in ("rank", "ranks", "fingerprint", "unit", "token", "root", "number")),
    ]


class Lie(NamedTuple):
    """Tensors of a call, of any size, that kernels are to read where they lie. ``at``: addresses of the ranks' tensors,
    as this rank's device reaches them, aligned to 16: of an all_reduce and a broadcast the one that it has, of an
    all_gather its input, of a reduce_scatter its inputs, one behind the other, each a multiple of 16 bytes; ``place``:
    what must then be the same on all ranks."""

    at: Sequence[int]
    place: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Failure:
    """Why the kernels gave up: ``kind``: TIMEOUT (``peer`` did not come), MISMATCH (``peer`` called something else),
    ABORTED (by this rank's host), PEER (``peer`` gave up) or AT_ONCE (two calls of this rank ran at once). ``number``:
    the low 32 bits of the call's."""

    kind: int
    peer: int
    number: int


class P2p:
    """One rank's end of the group.

    kernels: the Kernels of this rank's device. rank: this rank's index among the ranks of the group.
    pads, stagings: for each rank the address, as this rank's device reaches it, of `pad_bytes` and of
    ``staging_bytes`` bytes of device memory, the same number on all ranks, aligned to 256; this rank's own
    among them. record: the address of RECORD_BYTES of pinned host memory, aligned to 8, which host and device
    reach at the same address. Pads and record must be zero before any rank's first call, and everything stay
    mapped until every rank's last kernel has ended.

    Calls, a graph's replays among them, must be ordered by a stream, in the same order on all ranks.

    No call blocks. A kernel that gives up ends as usual, with garbage in the output: who waits for a call must look at
    failure() after it. Any thread may call busy(), failure() and abort(), at any time; the others one at a time.

    blocks, threads: of a kernel's grid, the same on all ranks. All blocks must run at once. locate: gives a call's
    Lie, or None. ``launched``: so many kernels, or put into graphs.
    """

    def __init__(
        self,
        kernels: Kernels,
        rank: int,
        pads: Sequence[int],
        stagings: Sequence[int],
        staging_bytes: int,
        record: int,
        blocks: int,
        threads: int = 512,
        locate: Callable[[Call], Lie | None] = lambda call: None,
    ) -> None:
        self._kernels, self._rank, self._ranks = kernels, rank, len(pads)
        self._pads, self._stagings, self._record = list(pads), list(stagings), record
        self._half = staging_bytes // 2 & -16
        self._blocks, self._threads = min(blocks, MAX_BLOCKS), threads
        self._tokens, self.launched = itertools.count(1), 0
        self._locate, self._lock = locate, threading.RLock()
        self._failure: Failure | None = None  # once the record is gone

    def run(self, stream: int, call: Call, number: int = 0, algorithm: str = "") -> None:
        """Enqueues ``call``; an output may be the input that is in its place, or a reduce_scatter's, any. The result is
        that of the CPU: in rank order, rounded once. Each kernel may wait for as long as the call; more bytes than
        _half take several. ``number``: which of the group's calls it is, for the other ranks' kernels to compare; 0:
        not known, as in a graph; ``algorithm``: which kernels of an all_reduce's, instead of what is fastest."""
        inputs, outputs = ([t.data_ptr() for t in side] for side in (call.inputs, call.outputs))
        bits = functools.reduce(operator.or_, [*inputs, *outputs])
        parts = outputs if call.op is Op.all_gather else inputs if call.op is Op.reduce_scatter else []
        root, lie = max(0, call.root), self._locate(call)
        common = dict(
            half=0 if lie else self._half,
            record=self._record,
            timeout_ns=max(1, int(call.timeout * 1e9)),
            rank=self._rank,
            ranks=self._ranks,
            root=root,
            number=number & 0xFFFFFFFF,
            unit=min(bits & -bits, 16) if bits else 16,
            factor=float(call.factor) if call.redop == PREMUL_SUM else 0.0,
        )
        for start, part, kind in self._parts(call, lie, algorithm):
            share = ((-(-part // self._ranks) if kind == "TwoShot" else part) + 15) & -16
            blocks = max(1, min(self._blocks, -(-share // (16 * self._threads))))
            token = self.launched = next(self._tokens)
            arguments = Arguments(
                input=inputs[0] + start if inputs else 0,
                output=outputs[0] + start if outputs else 0,
                bytes=part,
                slice=share,
                token=(token - 1) % 0xFFFFFFFF + 1,
                fingerprint=self._fingerprint(
                    *(call.op, call.dtype.code, call.redop, call.count, root, number, start, part, share),
                    *(self._blocks, self._threads, *(lie.place if lie else (0, 0))),
                ),
                **common,
            )
            arguments.pad[: self._ranks] = self._pads
            arguments.staging[: self._ranks] = lie.at if lie else self._stagings
            arguments.part[: len(parts)] = [address + start for address in parts]
            function = self._kernels.function(*self._kernel(kind, call))
            self._kernels.launch(function, stream, blocks, self._threads, arguments)

    def prepare(self, call: Call, algorithm: str = "") -> None:
        """Compiles its kernels, so that `run` only launches: before the other ranks are told of it, whose kernels then
        wait for its."""
        for key in self._needed(call, algorithm):
            self._kernels.function(*key)

    def prepared(self, call: Call) -> bool:
        """Whether that was done: nothing can be compiled while a CUDA graph is captured."""
        return all(self._kernels.has(*key) for key in self._needed(call))

    def _needed(self, call: Call, algorithm: str = "") -> list[tuple[str, DType, int]]:
        kinds = dict.fromkeys(kind for _, _, kind in self._parts(call, self._locate(call), algorithm))
        return [self._kernel(kind, call) for kind in kinds]

    @staticmethod
    def _kernel(algorithm: str, call: Call) -> tuple[str, DType, int]:
        return (algorithm, call.dtype, call.redop) if call.op in REDUCING else (algorithm, *MOVED)

    def _parts(self, call: Call, lie: Lie | None, algorithm: str) -> Iterator[tuple[int, int, str]]:
        """(start, bytes, algorithm) of each kernel: one at least, by which ranks compare what they call."""
        size = call.count * call.dtype.item_bytes
        most = self._half // self._ranks & -16 if call.op is Op.reduce_scatter else self._half
        if lie:
            most, algorithm = max(1, size), _ALGORITHMS.get(call.op, "TwoShot")
        for start in range(0, max(1, size), most):
            part = min(most, size - start)
            kind = algorithm or _ALGORITHMS.get(call.op) or fused_all_reduce(part, call.redop, self._ranks)
            yield start, part, kind

    def busy(self) -> bool:
        """Whether a kernel that was launched has not ended: found without a call of CUDA's. Not to be asked once graphs
        may launch some."""
        with self._lock:
            return self._record != 0 and (self.launched - self._word(16).value) & 0xFFFFFFFF != 0

    def failure(self) -> Failure | None:
        """The Failure, or None while the kernels have not given up."""
        with self._lock:
            word = self._word(0).value if self._record else 0
            return Failure(word >> 56, word >> 48 & 0xFF, word & 0xFFFFFFFF) if word else self._failure

    def abort(self, gone: Iterable[int] = ()) -> None:
        """Ends the waiting of this rank's kernels, and then of the other ranks'. ``gone``: ranks whose memory is not
        to be written any more."""
        with self._lock:
            if self._record:
                self._word(8).value |= 1 << 63 | sum(1 << rank for rank in set(gone))

    def close(self) -> None:
        """The last kernel has ended, and the record is about to be freed."""
        with self._lock:
            self._failure, self._record = self.failure(), 0

    def _word(self, at: int) -> c.c_uint64:
        return c.c_uint64.from_address(self._record + at)

    @staticmethod
    def _fingerprint(*what: int) -> int:
        return zlib.crc32(struct.pack(f"<{len(what)}Q", *what))
