"""What looks after kernels that wait for other ranks: the thread that ends their waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...threads import start, threading, time

if TYPE_CHECKING:
    from .. import Transport
    from .fused import Fused


log = logging.getLogger("c10d_custom")

_LOOK = 20e-3
_LATER = 0.1  # the same a second after the last call, and while there may be replays, but no calls


class Guard:
    """Ends the waiting of a group's kernels when a rank is gone or a call has failed, and the group when kernels have
    given up. Its thread calls nothing of CUDA's, where another thread's call may hold it up for long: kernels are told,
    and tell, by words in host memory. ``error()``: why the kernels of ``fused`` gave up, or None; ``end()``: tells the
    other ranks so."""

    def __init__(
        self, cpu: Transport, fused: Fused, error: Callable[[], BaseException | None], end: Callable[[], None]
    ) -> None:
        self._cpu, self._fused, self._error, self._end = cpu, fused, error, end
        self._captured = False
        self._often = 0.0  # when to look less often
        self._wake = threading.Event()
        self._over = False
        self._thread = start(self._run, "c10d_custom:guard")

    def watch(self) -> None:
        """Kernels have been launched."""
        self._often = time.monotonic() + 1.0
        self._wake.set()

    def captured(self) -> None:
        """From now on a graph may replay calls of the group."""
        self._captured = True
        self._wake.set()

    def _run(self) -> None:
        while not self._over:
            waiting = self._captured or self._fused.busy()
            if self._look(waiting):
                return
            if waiting:
                time.sleep(_LOOK if time.monotonic() < self._often else _LATER)
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
            self._fused.let_go(self._cpu.gone())
