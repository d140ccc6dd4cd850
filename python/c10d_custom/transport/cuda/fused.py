"""What one rank gives to the fused kernels of a group (p2p.py), and takes from the other ranks: its signal pad
with a staging area of its own, and the record in which its kernels say why they gave up. And what looks after them:
the thread that ends their waiting.

The rounds of `shared.py` have other staging memory: each of the two reuses its own by what its own calls have
made sure of, and knows nothing of the other's.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from ... import dtypes, native
from ...call import Call, Op, Region
from ...errors import AbortedError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, TransportError
from ...threads import start, threading, time
from . import p2p
from .algorithm import FUSED_BLOCKS, FUSED_STAGING
from .registered import Registered
from .stream_op import come_to, poll

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...errors import CustomBackendError
    from .host_exchange import Place


log = logging.getLogger("c10d_custom")

_LOOK = 20e-3
_LATER = 0.1  # the same a second after the last call, and while there may be replays, but no calls
_TOLD = 0.5
_INTS, _SUM = dtypes.BY_DTYPE[torch.int32], dtypes.SUM
_ALIGN = 256
_TRIED = 4096  # bytes that the trial adds up


class Fused:
    """``nbytes``: of every rank's memory, which is the Peers'; ``sharers``: the most ranks that have one GPU, where the
    blocks of all must run at once, and each finds a processor of its own. Steps in order: allocate, the stream has come
    to it, open, try_it, guard; then calls, by ``p2p``; then close, free. Any thread may call error(), at any time; the
    others one at a time.

    From `guard` to `close` a thread ends the waiting of the kernels when a rank is gone or a call has failed, and the
    group when kernels have given up. It calls nothing of CUDA's, where another thread's call may hold it up for long:
    kernels are told, and tell, by words in host memory. ``longest``: of the time-outs of calls; ``replays``: whether
    graphs may hold calls of the group."""

    def __init__(self, place: Place, sharers: int = 1) -> None:
        self._cpu, self._driver, self._where, self._sharers = place.cpu, place.driver, place.where, sharers
        self._rank, self._size = place.cpu.rank, place.cpu.size
        self._staging = min(FUSED_STAGING, place.config.cuda_staging_bytes)
        self._pad = -(-p2p.pad_bytes(self._size) // _ALIGN) * _ALIGN
        self.nbytes = self._pad + self._staging + _TRIED
        self._address = 0  # of this rank's memory
        self._record: Any = None  # an address, from `allocate` to `free`
        self.p2p: Any = None  # a P2p, from `open` on
        self.registered = Registered(self._driver, self._rank, self._size)
        self.longest, self.replays = 0.0, False
        self._often = 0.0  # when to look less often
        self._wake = threading.Event()
        self._over = False
        self._thread: Any = None

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

    def try_it(self, setup: Any) -> None:
        """All_reduce's kernels. Each rank gives its number plus 1 in every place, then the sum of that, and so on.
        ``setup``: the peers.Setup."""
        call = self._tried(setup.trial_seconds())
        address = call.inputs[0].data_ptr()
        setup.lies(address, _TRIED, (self._rank + 1).to_bytes(4, "little") * (_TRIED // 4))
        for algorithm in p2p.ALL_REDUCE:
            self.p2p.run(setup.stream, call, algorithm=algorithm)
        setup.settle(more=1.0)
        if (error := self._gave_up(call.name)) is not None:
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

    def watch(self, call: Call) -> None:
        """Its kernels have been launched. Whoever asks whether they are done looks at what has come of them."""
        op: Any = call.stream_op
        op.verdict = functools.partial(self.error, self._where(call, op.number), call.name, op.number, op.began)
        self.longest = max(self.longest, call.timeout)
        self._often = time.monotonic() + 1.0
        self._wake.set()

    def captured(self) -> None:
        """From now on a graph may replay calls."""
        self.replays = True
        self._wake.set()

    def check(self, call: Call) -> None:
        """Raises why the kernels gave up, on behalf of ``call``."""
        if (error := self.error(self._where(call))) is not None:
            self._end()
            raise error

    def error(self, where: str = "", name: str = "", number: int = 0, began: float = 0.0) -> BaseException | None:
        """Why the kernels gave up, or None. ``where``: for the error; "": some call. Else the call's name, its number
        and when it began."""
        error = self._gave_up(where or self._where())
        if isinstance(error, AbortedError | PeerLostError):
            if number:
                self._hear()
                found: BaseException | None = self._cpu.verdict(name, number, time.monotonic() - began)
                if found is not None and not isinstance(found, AbortedError):
                    return found
            if gone := self._cpu.gone():
                return PeerLostError(f"{error} (rank {', rank '.join(f'{r}: {what}' for r, what in gone.items())})")
        return error

    def _hear(self) -> None:
        """Waits a moment for what another rank is about to tell of its failure, which its kernels have told first."""
        poll(self._cpu.broken, time.monotonic() + _TOLD, lambda: False)

    def _end(self) -> None:
        """The kernels have given up: the group is over for all, if it is not yet."""
        failure = self.p2p.failure()
        if failure.kind == p2p.PEER:
            self._hear()
        if self._cpu.broken():
            return
        if failure.kind == p2p.TIMEOUT and failure.number:
            self._cpu.end_for_all(native.TIMEOUT, failure.peer, self._cpu.rank, failure.number)
        else:
            self._cpu.abort()

    def _gave_up(self, where: str) -> CustomBackendError | None:
        """As this rank's record has it. AbortedError: as the group has failed."""
        failure = self.p2p.failure()
        if failure is None:
            return None
        over = "Its result is void, and the group of no more use: destroy it."
        if failure.kind == p2p.TIMEOUT:
            it = f"collective #{failure.number}" if failure.number else "it"
            return CollectiveTimeoutError(
                f"{where}: Timed out on the GPU: the stream of rank {failure.peer} did not come to {it} in its time "
                f"(it last entered {self._cpu.peers()[failure.peer].calling}). {over}"
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

    # --- the thread

    def guard(self) -> None:
        self._thread = start(self._run, "c10d_custom:guard")

    def _run(self) -> None:
        while not self._over:
            waiting = self.replays or self.p2p.busy()
            if self._look(waiting):
                return
            if waiting:
                time.sleep(_LOOK if time.monotonic() < self._often else _LATER)
            else:
                self._wake.wait(1.0)
                self._wake.clear()

    def _look(self, waiting: bool) -> bool:
        """True once all waiting has been ended."""
        error = self.error()
        if error is None and not (waiting and self._cpu.broken() and not self._over):
            return False
        self.p2p.abort(self._cpu.gone())
        if error is not None:
            self._end()
            log.error("%s", error)  # nobody may be waiting for a replay
        return True

    def close(self) -> None:
        """Before this rank leaves: what has failed by then ends now, the rest goes on."""
        self._over = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if self._cpu.broken():
            self.p2p.abort(self._cpu.gone())

    def free(self) -> None:
        self.registered.free()
        if self.p2p is not None:
            self.p2p.close()
        record, self._record = self._record, None
        if record is not None:
            self._driver.free_pinned(record)
