"""The thread that moves messages on while nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable

from ..threads import IDLE_WORKER, Lent, lend, rest, threading, time

_LINGER = 0.05  # s with nothing to move, after which it is given back


class MessageThread:
    """``progress``: moves what can be moved, True if something did; ``live``: whether there is anything to move. It
    runs while there is, from `ensure` on: a lent thread."""

    def __init__(self, progress: Callable[[], bool], live: Callable[[], object]) -> None:
        self._progress, self._live = progress, live
        self._changed = threading.Condition()  # of an RLock: signal handlers come here, too
        self._thread: Lent | None = None
        self._starts = self._over = False

    def ensure(self) -> None:
        with self._changed:
            if starts := self._starts:
                self._changed.notify_all()
            self._starts = True
        if not starts:
            try:
                self._thread = lend(self._run, "c10d_custom:messages")  # without the lock
            except RuntimeError:
                self._starts = False
                raise

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            moved = self._progress()
            now = time.monotonic()
            if moved or self._live():
                last = now if moved else last
                rest(IDLE_WORKER, now - last)
                continue
            with self._changed:
                if self._over:
                    return
                if not self._changed.wait_for(lambda: self._over or self._live(), _LINGER):
                    self._starts = False
                    return
                last = time.monotonic()

    def end(self) -> None:
        """Asks the thread to end; `join` waits until it has."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        if self._thread is not None and not self._thread.is_here():
            self._thread.join(seconds)
