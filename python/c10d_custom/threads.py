"""Threads that a signal handler cannot leave half started, and threads of the process that are lent; how a wait in
Python spends its time; and what threads, waits and sockets are made of, for all of this package.

threading.Thread.start, interrupted by a handler that raises, leaves a thread that dies at its first step, or one that
runs and cannot be joined. Handlers run in the main thread only, so another one calls it.

A group has a lent thread while there is something to do for it, so that their number follows what goes on at once, not
how many groups there are. One that is idle ends after a while.

gevent and eventlet put others in the place of the standard library's threads, sleeps, locks, polls and sockets, which
let other parts of the same thread run meanwhile: a call of the native core does not, a datagram that is not there is
waited for whatever was said, and the thread that is to end a wait never runs. Where that was done before this module is
imported, the package has copies of its own of these modules, made of what nobody can replace."""

from __future__ import annotations

import _thread
import builtins
import functools
import os
import queue
import select
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, NamedTuple

from .config import Config

__all__ = [
    "GPU",
    "IDLE_WORKER",
    "NEWS",
    "OVER_MPI",
    "Lent",
    "allocate_lock",
    "lend",
    "own",
    "queue",
    "rest",
    "select",
    "selectors",
    "socket",
    "start",
    "start_new_thread",
    "threading",
    "time",
    "wait_until",
]


def _replaced() -> bool:
    functions = _thread.start_new_thread, _thread.allocate_lock, time.sleep, select.poll
    return {f.__module__ for f in functions} != {"_thread", "time", "select"} or socket.socket.__module__ != "socket"


def _copies(*names: str) -> dict[str, Any]:
    """Of these modules, in this order, each of which has the copies before it where it imports such a module."""
    made: dict[str, Any] = {}

    def load(name: str, *arguments: Any, **named: Any) -> ModuleType:
        return made[name] if name in made else __import__(name, *arguments, **named)

    for name in names:
        spec: Any = sys.modules[name].__spec__
        made[name] = module = module_from_spec(spec)
        code = spec.loader.get_code(name)
        if code is None:  # in C
            spec.loader.exec_module(module)
        else:
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": load}
            exec(code, module.__dict__)
    return made


if _replaced():
    _made = _copies("_thread", "time", "select", "threading", "selectors", "socket", "queue")
    _thread, time, select, threading = (_made[name] for name in ("_thread", "time", "select", "threading"))
    selectors, socket, queue = (_made[name] for name in ("selectors", "socket", "queue"))


_owned: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own(link: socket.socket) -> socket.socket:
    """Returns ``link``, and closes it in each child that is forked: as long as a child had it, peers would take this
    process for alive."""
    _owned.add(link)
    return link


class Waiting(NamedTuple):
    """How a wait for one kind of thing looks for it. ``awake``: for how many times C10D_CUSTOM_SPIN_US it yields its
    core between looks; then it sleeps between them ``often``, and ``rarely`` once it has lasted ``patience``, all in
    seconds. (Waits in the core: backend/shm. Waits for the store, while a group is made, are as long as a store's
    answer takes: creation/.)"""

    awake: float
    often: float
    patience: float
    rarely: float = 1e-3


OVER_MPI = Waiting(1.5, 50e-6, 0.1)  # what MPI brings: backend/shm/waiting.h's awake_amid_transfers
GPU = Waiting(1.0, 50e-6, 20e-3)
IDLE_WORKER = Waiting(0.0, 100e-6, 0.05)  # of a thread that looks for what others may have to do
NEWS = Waiting(0.0, 1e-3, 0.3, 5e-3)  # of why a call has failed, which another thread or the store brings


def rest(kind: Waiting, waited: float) -> None:
    """Between two looks of a wait that has lasted ``waited`` seconds."""
    if waited < kind.awake * _spin():
        os.sched_yield()
    else:
        time.sleep(kind.often if waited < kind.patience else kind.rarely)


def wait_until(answer: Callable[[], Any], kind: Waiting, seconds: float) -> Any:
    """Asks again and again, for up to so many seconds, until the answer is true. Returns the last answer."""
    began = time.monotonic()
    while not (last := answer()) and (waited := time.monotonic() - began) < seconds:
        rest(kind, waited)
    return last


@functools.cache
def _spin() -> float:
    return Config.from_env().spin_us * 1e-6


start_new_thread, allocate_lock = _thread.start_new_thread, _thread.allocate_lock
_IDLE = 1.0  # s


def start(target: Callable[[], object], name: str) -> threading.Thread:
    """Starts a daemon thread and returns it once it runs ``target``. Raises RuntimeError if the system has no more
    threads."""
    thread, started, errors = threading.Thread(target=target, name=name, daemon=True), threading.Event(), []

    def begin() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            errors.append(error)
        started.set()

    start_new_thread(begin, ())
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
    for link in list(_owned):
        link.close()


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
