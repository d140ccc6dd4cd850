"""all_reduce by fused kernels, for ranks that each have a GPU of their own and reach each other's memory: the
host's side of backend/cuda/p2p.h, which has the protocol."""

from __future__ import annotations

import ctypes as c
import functools
import itertools
import operator
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from .algorithm import FUSED_RANKS
from .kernels import PREMUL_SUM, divisor_of

if TYPE_CHECKING:
    from ...dtypes import DType
    from .kernels import Kernels


MAX_RANKS, MAX_BLOCKS = FUSED_RANKS, 64
TIMEOUT, MISMATCH, ABORTED, PEER, AT_ONCE = range(1, 6)  # Kind
PAD_BYTES = 128 + 2 * MAX_BLOCKS * MAX_RANKS * 16
RECORD_BYTES = 16
# Prior art's: up to so many bytes every rank reads all inputs, rather than its slice of them.
_ONE_SHOT_BYTES = dict.fromkeys(range(1, 5), 512 << 10)
_ONE_SHOT_BYTES_MANY = 256 << 10


class Arguments(c.Structure):
    """p2p::Arguments."""

    _fields_ = [
        ("pad", c.c_uint64 * MAX_RANKS),
        ("staging", c.c_uint64 * MAX_RANKS),
        *((name, c.c_uint64) for name in ("input", "output", "bytes", "half", "slice", "record", "timeout_ns")),
        ("factor", c.c_double),
        *((name, c.c_uint32) for name in ("rank", "ranks", "fingerprint", "unit", "divisor", "token")),
    ]


@dataclass(frozen=True)
class Failure:
    """Why the kernels gave up: ``kind``: TIMEOUT (``peer`` did not come), MISMATCH (``peer`` called something else),
    ABORTED (by this rank's host), PEER (``peer`` gave up) or AT_ONCE (two calls of this rank ran at once). ``number``:
    of the kernel, from 0, in the order in which the device ran them; not of AT_ONCE."""

    kind: int
    peer: int
    number: int


class P2p:
    """One rank's end of the group.

    kernels: the Kernels of this rank's device. rank: this rank's index among the ranks of the group.
    pads, stagings: for each rank the address, as this rank's device reaches it, of PAD_BYTES and of
    ``staging_bytes`` bytes of device memory, the same number on all ranks, aligned to 256; this rank's own
    among them. record: the address of RECORD_BYTES of pinned host memory, aligned to 8, which host and device
    reach at the same address. Pads and record must be zero before any rank's first call, and everything stay
    mapped until every rank's last kernel has ended.

    all_reduce may be captured in a CUDA graph, with all its arguments: each replay is one more call. Calls,
    replays among them, must be ordered by a stream, in the same order on all ranks, and no host need take part
    in the agreement: ranks that call different things find out in the kernel, and so does one whose calls run at once.

    No call blocks, and nothing waits on the device beyond the time-out. A kernel that gives up ends as usual,
    with garbage in the output: who waits for a call must look at failure() after it. The group is of no use
    from then on, on any rank. Any thread may call failure() and abort(); the others one at a time.

    blocks, threads: of a kernel's grid, the same on all ranks. All blocks must run at once. ``launched``: so many
    kernels, or put into graphs.
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
    ) -> None:
        if not 1 <= len(pads) <= MAX_RANKS:
            raise UsageError(f"the p2p mode takes 1 to {MAX_RANKS} ranks, not {len(pads)}")
        self._kernels, self._rank, self._ranks = kernels, rank, len(pads)
        self._pads, self._stagings, self._record = list(pads), list(stagings), record
        self._half = staging_bytes // 2 & -16
        self._one_shot = min(_ONE_SHOT_BYTES.get(len(pads), _ONE_SHOT_BYTES_MANY), self._half)
        self._blocks, self._threads = min(blocks, MAX_BLOCKS), threads
        self._tokens, self.launched = itertools.count(1), 0

    def all_reduce(
        self,
        stream: int,
        dtype: DType,
        redop: int,
        factor: Any,
        source: int,
        target: int,
        count: int,
        timeout_ns: int,
        one_shot: bool | None = None,
    ) -> None:
        """Enqueues target[i] = the reduction over all ranks' source[i], in rank order, rounded once. ``source``
        and ``target`` are addresses and may be the same; ``dtype``, ``redop`` as Kernels.reduce has them;
        ``factor``: of AVG what is divided by (None: the number of ranks), of PREMUL_SUM this rank's.
        ``timeout_ns``: how long each kernel may wait; more than _half bytes take several; ``one_shot``: which
        kind they are, None: as it is faster."""
        size = count * dtype.item_bytes
        bits = functools.reduce(operator.or_, (source, target))
        self.prepare(dtype, redop, count, one_shot)
        common = dict(
            half=self._half,
            record=self._record,
            timeout_ns=timeout_ns,
            rank=self._rank,
            ranks=self._ranks,
            unit=min(bits & -bits, 16) if bits else 16,
            factor=float(factor) if redop == PREMUL_SUM else 0.0,
            divisor=divisor_of(redop, factor, self._ranks),
        )
        for start, part, algorithm in self._parts(size, one_shot):
            share = ((part if algorithm == "OneShot" else -(-part // self._ranks)) + 15) & -16
            number = self.launched = next(self._tokens)
            arguments = Arguments(
                input=source + start,
                output=target + start,
                bytes=part,
                slice=share,
                token=(number - 1) % 0xFFFFFFFF + 1,
                fingerprint=self._fingerprint(
                    dtype, redop, common["divisor"], count, start, self._blocks, self._threads, share
                ),
                **common,
            )
            arguments.pad[: self._ranks] = self._pads
            arguments.staging[: self._ranks] = self._stagings
            blocks = min(self._blocks, -(-share // (16 * self._threads)))
            self._kernels.launch(
                self._kernels.function(algorithm, dtype, redop), stream, blocks, self._threads, arguments
            )

    def prepare(self, dtype: DType, redop: int, count: int, one_shot: bool | None = None) -> None:
        """Compiles the kernels of such a call, so that all_reduce only launches."""
        for algorithm in self._algorithms(dtype, count, one_shot):
            self._kernels.function(algorithm, dtype, redop)

    def prepared(self, dtype: DType, redop: int, count: int) -> bool:
        """Whether that was done: nothing can be compiled while a CUDA graph is captured."""
        return all(self._kernels.has(algorithm, dtype, redop) for algorithm in self._algorithms(dtype, count))

    def _algorithms(self, dtype: DType, count: int, one_shot: bool | None = None) -> Iterable[str]:
        return dict.fromkeys(algorithm for _, _, algorithm in self._parts(count * dtype.item_bytes, one_shot))

    def _parts(self, size: int, one_shot: bool | None = None) -> Iterator[tuple[int, int, str]]:
        """(start, bytes, algorithm) of each kernel."""
        for start in range(0, size, self._half):
            part = min(self._half, size - start)
            small = part <= self._one_shot if one_shot is None else one_shot
            yield start, part, "OneShot" if small else "TwoShot"

    def failure(self) -> Failure | None:
        """The Failure, or None while the kernels have not given up."""
        word = c.c_uint64.from_address(self._record).value
        return Failure(word >> 56, word >> 48 & 0xFF, word & 0xFFFFFFFF) if word else None

    def abort(self, gone: Iterable[int] = ()) -> None:
        """Ends the waiting of this rank's kernels, and then of the other ranks'. ``gone``: ranks whose memory is not
        to be written any more."""
        word = c.c_uint64.from_address(self._record + 8)
        word.value = word.value | 1 << 63 | sum(1 << rank for rank in set(gone))

    @staticmethod
    def _fingerprint(*what: Any) -> int:
        numbers = [w if isinstance(w, int) else w.code for w in what]
        return zlib.crc32(struct.pack(f"<{len(numbers)}Q", *numbers))
