"""The thread that moves messages on while nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable

from ..threads import start, threading, time

_LINGER = 0.05  # s without news, after which it looks more rarely
_OFTEN, _RARELY = 100e-6, 1e-3


class MessageThread:
    """``progress``: moves what can be moved, True if something did; ``live``: whether there is anything to move. It
    runs while there is, from `ensure` on."""

    def __init__(self, progress: Callable[[], bool], live: Callable[[], object]) -> None:
        self._progress, self._live = progress, live
        self._changed = threading.Condition()  # of an RLock: signal handlers come here, too
        self._thread: threading.Thread | None = None
        self._starts = self._over = False

    def ensure(self) -> None:
        with self._changed:
            if starts := self._starts:
                self._changed.notify_all()
            self._starts = True
        if not starts:
            try:
                self._thread = start(self._run, "c10d_custom:messages")  # without the lock
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
                time.sleep(_OFTEN if now - last < _LINGER else _RARELY)
                continue
            with self._changed:
                if self._over:
                    return
                self._changed.wait_for(lambda: self._over or self._live())
                last = time.monotonic()

    def end(self) -> None:
        """It will end; `join` awaits it."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)
