"""What looks after streams that wait for other ranks: the thread that ends their waiting."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from ...errors import CustomBackendError, PeerLostError
from ...threads import start

if TYPE_CHECKING:
    from .stream_op import StreamOp
    from .transport import CudaTransport


log = logging.getLogger("c10d_custom")

_LOOK = 20e-3
_GRAPHS = 0.1  # the same while there may be replays, but no calls


class Guard:
    """Ends the waiting of a group's streams when a rank is gone, a call has failed or its time is over, and the group
    when kernels have given up. All of it at once; and from then on again and again while they are not idle, for a rank
    that is late may write over what ended it."""

    def __init__(self, transport: CudaTransport) -> None:
        self._t = transport
        self._stream_ops: list[tuple[StreamOp, float]] = []  # and their deadlines
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._over = self._released = False
        self._thread = start(self._run, "c10d_custom:guard")

    def watch(self, stream_op: StreamOp, deadline: float) -> None:
        with self._lock:
            self._stream_ops.append((stream_op, deadline))
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def release(self) -> None:
        """A call has failed: nothing is to wait any more."""
        self._released = True
        self._wake.set()

    def _run(self) -> None:
        while not (self._over or self._released or self._look()):
            if self._stream_ops:
                time.sleep(_LOOK)
            else:
                self._wake.wait(_GRAPHS if self._t.captured else 1.0)
                self._wake.clear()
        while not self._over:
            self._wake.clear()
            idle = False
            with contextlib.suppress(Exception), self._t.driver.activate():  # a GPU that has failed fails here, too
                self._t.let_go()
                idle = self._t.idle(_LOOK)
            self._wake.wait(1.0 if idle else _LOOK)

    def _look(self) -> bool:
        """True once all waiting is to end."""
        t = self._t
        try:
            with self._lock:
                self._stream_ops = [(f, d) for f, d in self._stream_ops if not f.completed()]
            error = t.kernels_error()
        except CustomBackendError as found:
            error = found.with_traceback(None)
        if not self._stream_ops and not t.captured and error is None:
            return False
        late = any(time.monotonic() >= d for _, d in self._stream_ops)
        if error is None and not late and (self._over or not t.cpu.broken()):
            return False
        self._give_up(error)
        if late or error is not None:
            t.cpu.abort()
        if error is not None:  # nobody may be waiting for a replay
            log.error("%s", error)
        return True

    def _give_up(self, error: CustomBackendError | None) -> None:
        # Before their waits end: who looks at them afterwards must find it.
        for stream_op, _ in self._stream_ops:
            stream_op.failed = error or PeerLostError(
                "a call on CUDA tensors went on without another rank's part, which did not come in time: its result is "
                "void, and the group of no more use. Destroy it."
            )
        with self._t.driver.activate():
            self._t.let_go()

    def close(self) -> None:
        """Before this rank leaves: what has failed by then ends now, the rest goes on."""
        self._over = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if self._t.cpu.broken():
            self._give_up(None)
        self._stream_ops = []
