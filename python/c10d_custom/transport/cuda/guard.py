"""What looks after kernels that wait for other ranks: why they gave up, and the thread that ends their waiting."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from ... import native
from ...errors import AbortedError, PeerLostError
from ...threads import start, threading, time
from .p2p import PEER, TIMEOUT
from .stream_op import poll

if TYPE_CHECKING:
    from ...call import Call
    from .fused import Fused
    from .host_exchange import Place


log = logging.getLogger("c10d_custom")

_LOOK = 20e-3
_LATER = 0.1  # the same a second after the last call, and while there may be replays, but no calls
_TOLD = 0.5


class Guard:
    """Ends the waiting of a group's kernels when a rank is gone or a call has failed, and the group when kernels have
    given up. Its thread calls nothing of CUDA's, where another thread's call may hold it up for long: kernels are told,
    and tell, by words in host memory. ``longest``: of the time-outs of calls; ``replays``: whether graphs may hold
    calls of the group."""

    def __init__(self, place: Place, fused: Fused) -> None:
        self._cpu, self._where, self.fused = place.cpu, place.where, fused
        self.longest, self.replays = 0.0, False
        self._often = 0.0  # when to look less often
        self._wake = threading.Event()
        self._over = False
        self._thread = start(self._run, "c10d_custom:guard")

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
        peers = self._cpu.peers
        error = self.fused.error(where or self._where(), lambda r: f" (it last entered {peers()[r].calling})")
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
        failure = self.fused.p2p.failure()
        if failure is not None and failure.kind == PEER:
            self._hear()
        if self._cpu.broken():
            return
        if failure is not None and failure.kind == TIMEOUT and failure.number:
            self._cpu.end_for_all(native.TIMEOUT, failure.peer, self._cpu.rank, failure.number)
        else:
            self._cpu.abort()

    def _run(self) -> None:
        while not self._over:
            waiting = self.replays or self.fused.p2p.busy()
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
        self.fused.p2p.abort(self._cpu.gone())
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
            self.fused.p2p.abort(self._cpu.gone())
