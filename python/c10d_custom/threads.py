"""Threads that a signal handler cannot leave half started; and what threads, waits and sockets are made of, for all of
this package.

threading.Thread.start, interrupted by a handler that raises, leaves a thread that dies at its first step, or one that
runs and cannot be joined. Handlers run in the main thread only, so another one calls it.

gevent and eventlet put others in the place of the standard library's threads, sleeps, locks, polls and sockets, which
let other parts of the same thread run meanwhile: a call of the native core does not, a datagram that is not there is
waited for whatever was said, and the thread that is to end a wait never runs. Where that was done before this module is
imported, the package has copies of its own of these modules, made of what nobody can replace."""

from __future__ import annotations

import _thread
import builtins
import queue
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

__all__ = ["queue", "select", "selectors", "socket", "start", "start_new_thread", "threading", "time"]


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

start_new_thread = _thread.start_new_thread


def start(target: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread that runs ``target``, once it runs. Raises RuntimeError if the system has no more threads."""
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
