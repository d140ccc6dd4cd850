"""What looks after kernels that wait for other ranks: the thread that ends their waiting."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import CustomBackendError
from ...threads import start, threading, time

if TYPE_CHECKING:
    from .. import Transport
    from .fused import Fused
    from .stream_op import StreamOp


log = logging.getLogger("c10d_custom")

_LOOK = 20e-3
_LATER = 0.1  # the same a second after the last call, and while there may be replays, but no calls


class Guard:
    """Ends the waiting of a group's kernels when a rank is gone or a call has failed, and the group when kernels have
    given up. Its thread calls nothing of CUDA's, where another thread's call may hold it up for long: kernels are told,
    and tell, by words in host memory. So it does not know which calls are over, and looks while one may not be.
    ``error()``: why the kernels of ``fused`` gave up, or None."""

    def __init__(self, cpu: Transport, fused: Fused, error: Callable[[], CustomBackendError | None]) -> None:
        self._cpu, self._fused, self._error = cpu, fused, error
        self._captured = False
        self._calls: deque[StreamOp] = deque(maxlen=64)  # the last ones that are not known to be over
        self._until = self._often = 0.0  # when the last call has ended, one way or the other; when to look less often
        self._wake = threading.Event()
        self._over = False
        self._thread = start(self._run, "c10d_custom:guard")

    def watch(self, stream_op: StreamOp, seconds: float) -> None:
        """``seconds``: its time-out, which each of its kernels has. In the thread that has launched them: those before
        that are over are so from now on, whatever becomes of this one."""
        with contextlib.suppress(CustomBackendError):  # of a call that has failed: who asks for it hears
            for call in list(self._calls):
                if not call.completed():
                    break
                self._calls.popleft()
        self._calls.append(stream_op)
        now = time.monotonic()
        self._until, self._often = max(self._until, now + seconds + _LATER), now + 1.0
        self._wake.set()

    def captured(self) -> None:
        """From now on a graph may replay calls of the group."""
        self._captured = True
        self._wake.set()

    def _run(self) -> None:
        while not self._over:
            now = time.monotonic()
            waiting = now < self._until or self._captured
            if self._look(waiting):
                return
            if waiting:
                time.sleep(_LOOK if now < self._often else _LATER)
            else:
                self._wake.wait(1.0)
                self._wake.clear()

    def _look(self, waiting: bool) -> bool:
        """True once all waiting has been ended."""
        error = self._error()
        if error is None and not (waiting and self._cpu.broken() and not self._over):
            return False
        self._fused.let_go(self._cpu.gone())
        if error is not None:
            self._cpu.abort()
            log.error("%s", error)  # nobody may be waiting for a replay
        return True

    def close(self) -> None:
        """Before this rank leaves: what has failed by then ends now, the rest goes on."""
        self._over = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if self._cpu.broken():
            self._fused.let_go(self._cpu.gone())
        self._calls.clear()
