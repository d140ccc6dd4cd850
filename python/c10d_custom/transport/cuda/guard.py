"""What looks after streams that wait for other ranks: the thread that ends their waiting."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from ...errors import CustomBackendError, PeerLostError, TransportError
from ...threads import start, threading, time

if TYPE_CHECKING:
    from ..base import Transport
    from .driver import Driver
    from .stream_op import StreamOp


log = logging.getLogger("c10d_custom")

_LOOK = 20e-3
_GRAPHS = 0.1  # the same while there may be replays, but no calls


class Guarded(Protocol):
    """The group whose streams those are. ``captured``: a graph may replay calls of it."""

    cpu: Transport
    driver: Driver
    captured: bool

    def kernels_error(self) -> CustomBackendError | None:
        """Why its kernels gave up, or None."""

    def let_go(self) -> None:
        """Ends its streams' waits; one call may not do."""

    def idle(self, seconds: float) -> bool:
        """Whether the GPU is done with all of it by then."""


class Guard:
    """Ends the waiting of a group's streams when a rank is gone, a call has failed or its time is over, and the group
    when kernels have given up. All of it at once; and from then on again and again while they are not idle, for a rank
    that is late may write over what ended it."""

    def __init__(self, group: Guarded) -> None:
        self._group = group
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
                self._wake.wait(_GRAPHS if self._group.captured else 1.0)
                self._wake.clear()
        while not self._over:
            self._wake.clear()
            self._wake.wait(1.0 if self._let_go() else _LOOK)

    def _look(self) -> bool:
        """True once all waiting is to end."""
        group = self._group
        error: CustomBackendError | None
        try:
            with self._lock:
                self._stream_ops = [(f, d) for f, d in self._stream_ops if not f.completed()]
            error = group.kernels_error()
        except CustomBackendError as found:
            error = found.with_traceback(None)
        except Exception as found:  # a GPU that has failed
            error = TransportError(f"a call on CUDA tensors: {type(found).__name__}: {found}")
        if not self._stream_ops and not group.captured and error is None:
            return False
        late = any(time.monotonic() >= d for _, d in self._stream_ops)
        if error is None and not late and (self._over or not group.cpu.broken()):
            return False
        self._give_up(error)
        if late or error is not None:
            group.cpu.abort()
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
        self._let_go()

    def _let_go(self) -> bool:
        """Whether the GPU was idle soon after."""
        with contextlib.suppress(Exception), self._group.driver.activate():  # a GPU that has failed fails here, too
            self._group.let_go()
            return self._group.idle(_LOOK)
        return False

    def close(self) -> None:
        """Before this rank leaves: what has failed by then ends now, the rest goes on."""
        self._over = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if self._group.cpu.broken():
            self._give_up(None)
        self._stream_ops = []
