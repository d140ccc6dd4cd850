"""Threads that a signal handler cannot leave half started, and threads of the process that are lent.

threading.Thread.start, interrupted by a handler that raises, leaves a thread that dies at its first step, or one that
runs and cannot be joined. Handlers run in the main thread only, so another one calls it.

A group has a lent thread while there is something to do for it, so that their number follows what goes on at once, not
how many groups there are. One that is idle ends after a while."""

from __future__ import annotations

import _thread
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_IDLE = 1.0  # s


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


class Lent:
    """What a lent thread does, from `lend` on until it is over."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        self._target: Callable[[], object] | None = target
        self._name, self._thread, self._over = name, 0, threading.Event()

    def run(self) -> None:
        target, self._target, self._thread = self._target, None, _thread.get_ident()
        thread = threading.current_thread()
        thread.name = self._name
        try:
            if target is not None:
                target()
        finally:
            thread.name = "c10d_custom:idle"
            self._over.set()

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def is_here(self) -> bool:
        """Whether the calling thread is at it."""
        return self._thread == _thread.get_ident() and self.is_alive()

    def join(self, seconds: float) -> None:
        self._over.wait(seconds)


# What nobody has begun, and the locks that idle threads sleep on. Each errand comes with a thread that looks for it:
# one that is woken, in the same step as it is taken off the list, or a new one.
_errands: deque[Lent] = deque()
_idle: deque[Any] = deque()


def _forked() -> None:
    _errands.clear()
    _idle.clear()


os.register_at_fork(after_in_child=_forked)


def lend(target: Callable[[], object], name: str) -> Lent:
    """Has an idle thread run ``target``, or else a new one. Raises RuntimeError if the system has no more threads."""
    errand = Lent(target, name)
    _errands.append(errand)
    try:
        deque(map(_thread.LockType.release, map(deque.pop, (_idle,))), maxlen=0)
        return errand
    except IndexError:
        pass
    try:
        start(_serve, name)
    except RuntimeError:
        try:
            _errands.remove(errand)
        except ValueError:  # one that was through with another has it
            return errand
        raise
    return errand


def _serve() -> None:
    wake = _thread.allocate_lock()
    wake.acquire()
    while True:
        while _errands:
            try:
                errand = _errands.popleft()
            except IndexError:  # another thread was first
                break
            errand.run()
            del errand
        _idle.append(wake)
        if not wake.acquire(timeout=_IDLE):
            try:
                _idle.remove(wake)
                return
            except ValueError:  # it is being woken
                wake.acquire()
