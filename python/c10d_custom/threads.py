"""Threads that a signal handler cannot leave half started.

threading.Thread.start, interrupted by a handler that raises, leaves a thread that dies at its first step, or one that
runs and cannot be joined. Handlers run in the main thread only, so another one calls it."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


def start(target: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread that runs ``target``, once it runs. Raises RuntimeError if the system has no more threads."""
    thread, started, errors = threading.Thread(target=target, name=name, daemon=True), threading.Event(), []

    def begin() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            errors.append(error)
        started.set()

    _thread.start_new_thread(begin, ())
    started.wait()
    if errors:
        raise errors[0]
    return thread
