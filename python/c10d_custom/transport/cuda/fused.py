"""What one rank gives to the fused kernels of a group (p2p.py), and takes from the other ranks: its signal pad
with a staging area of its own, and the record in which its kernels say why they gave up.

The rounds of `shared.py` have other staging memory: each of the two reuses its own by what its own calls have
made sure of, and knows nothing of the other's.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from ... import dtypes
from ...call import Call, Op, Region
from ...errors import AbortedError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, TransportError
from . import p2p
from .algorithm import FUSED_BLOCKS, FUSED_STAGING
from .registered import Registered
from .stream_op import come_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...errors import CustomBackendError
    from .driver import Driver
    from .peers import Setup


_INTS, _SUM = dtypes.BY_DTYPE[torch.int32], dtypes.SUM
_ALIGN = 256
_TRIED = 4096  # bytes that the trial adds up


class Fused:
    """``nbytes``: of every rank's memory, which is the Peers'; ``sharers``: the most ranks that have one GPU, where the
    blocks of all must run at once, and each finds a processor of its own. Steps in order: allocate, ``stream`` has come
    to it, open; then calls, by ``p2p``; then free. Any thread may call error(), at any time; the others one at a
    time."""

    def __init__(self, driver: Driver, rank: int, size: int, staging_bytes: int, sharers: int = 1) -> None:
        self._driver, self._rank, self._size, self._sharers = driver, rank, size, sharers
        self._staging = min(FUSED_STAGING, staging_bytes)
        self._pad = -(-p2p.pad_bytes(size) // _ALIGN) * _ALIGN
        self.nbytes = self._pad + self._staging + _TRIED
        self._address = 0  # of this rank's memory
        self._record: Any = None  # an address, from `allocate` to `free`
        self.p2p: Any = None  # a P2p, from `open` on
        self.registered = Registered(driver, rank, size)

    def allocate(self, stream: int, address: int) -> None:
        self._record = self._driver.allocate_pinned(p2p.RECORD_BYTES + 4)  # behind it: what `runs` reads
        ctypes.memset(self._record, 0, p2p.RECORD_BYTES)
        self._address = address
        self._driver.zero(stream, address, self.nbytes)

    def open(self, pads: Sequence[int]) -> None:
        """``pads``: where the memory of each rank is."""
        stagings = [pad + self._pad for pad in pads]
        kernels = self._driver.kernels
        blocks = FUSED_BLOCKS if self._sharers == 1 else max(1, min(FUSED_BLOCKS, kernels.processors // self._sharers))
        locate = self.registered.located
        self.p2p = p2p.P2p(kernels, self._rank, pads, stagings, self._staging, self._record, blocks, locate=locate)
        for algorithm in p2p.ALL_REDUCE:  # for the trial, before kernels wait for each other
            self.p2p.prepare(self._tried(), algorithm=algorithm)

    # --- the trial: every rank's flags reach every rank's kernels, and so does what they have put

    def _tried(self, seconds: float = 0.0) -> Call:
        at = [Region(self._address + self._pad + self._staging, _TRIED, _TRIED // 4)]
        name = "trial of the kernels of p2p mode"
        return Call(Op.all_reduce, name, _INTS, seconds, at, at, count=_TRIED // 4, redop=_SUM)

    def try_it(self, setup: Setup) -> None:
        """All_reduce's kernels. Each rank gives its number plus 1 in every place, then the sum of that, and so on."""
        call = self._tried(setup.trial_seconds())
        address = call.inputs[0].data_ptr()
        setup.lies(address, _TRIED, (self._rank + 1).to_bytes(4, "little") * (_TRIED // 4))
        for algorithm in p2p.ALL_REDUCE:
            self.p2p.run(setup.stream, call, algorithm=algorithm)
        setup.settle(more=1.0)
        if (error := self.error(call.name)) is not None:
            raise error
        want = self._size ** (len(p2p.ALL_REDUCE) - 1) * self._size * (self._size + 1) // 2
        if setup.lies(address, _TRIED) != want.to_bytes(4, "little") * (_TRIED // 4):
            raise TransportError("the kernels of p2p mode do not add up what the ranks gave")

    # --- what becomes of calls

    def runs(self, stream: int, until: float) -> bool:
        """Whether a kernel has begun, of a graph on whatever stream, and not ended: found by a copy on ``stream``."""
        said = self._record + p2p.RECORD_BYTES
        self._driver.copy(stream, said, self._address + p2p.OWNER, 4)
        came = come_to(self._driver, stream, until, lambda: False)
        return not came or ctypes.c_uint32.from_address(said).value != 0

    def error(self, where: str, doing: Callable[[int], str] = lambda rank: "") -> CustomBackendError | None:
        """Why the kernels have given up, as an error of ``where``; None while they have not. ``doing``: what a rank
        does instead, in brackets. AbortedError: as the group has failed."""
        failure = self.p2p.failure()
        if failure is None:
            return None
        over = "Its result is void, and the group of no more use: destroy it."
        if failure.kind == p2p.TIMEOUT:
            it = f"collective #{failure.number}" if failure.number else "it"
            return CollectiveTimeoutError(
                f"{where}: Timed out on the GPU: the stream of rank {failure.peer} did not come to {it} in its time"
                f"{doing(failure.peer)}. {over}"
            )
        if failure.kind == p2p.MISMATCH:
            return CollectiveMismatchError(
                f"{where}: on the GPU, rank {failure.peer} came with another call. Do all "
                "ranks replay the same CUDA graphs, in the same order? Do all give one tensor of c10d_custom.empty, "
                f"or none? {over}"
            )
        if failure.kind == p2p.AT_ONCE:
            return CollectiveMismatchError(
                f"{where}: two calls of this rank ran on the GPU at once. While a CUDA graph replays, no other call of "
                f"the group may run: let the stream of each wait for the other's. {over}"
            )
        if failure.kind == p2p.ABORTED:
            return AbortedError(f"{where}: ended on the GPU, as a rank is gone or the group was aborted. {over}")
        return PeerLostError(f"{where}: rank {failure.peer} has given up on the GPU. {over}")

    # --- the end

    def free(self) -> None:
        self.registered.free()
        if self.p2p is not None:
            self.p2p.close()
        record, self._record = self._record, None
        if record is not None:
            self._driver.free_pinned(record)
