"""Watches the package's locks: in which order threads take them, and whether one is held while a thread starts.

with watched() as seen: ...     # locks made inside are watched
seen.require_order(); seen.started_under
"""

import contextlib
import sys
import threading

from c10d_custom import threads
from c10d_custom.c10d import work
from c10d_custom.transport import message_thread, tickets
from c10d_custom.transport.cuda import fused
from c10d_custom.transport.hosts import error_text

_USERS = {"start": (error_text, fused, threads), "lend": (work, tickets, message_thread)}  # of threads


class Seen:
    def __init__(self):
        self.taken = set()  # by the lines that made them
        self.order = {}  # lock -> locks taken while it was held
        self.started_under = set()
        self._held = threading.local()

    def held(self):
        if not hasattr(self._held, "locks"):
            self._held.locks = []
        return self._held.locks

    def took(self, name):
        held = self.held()
        self.taken.add(name)
        for outer in held:
            if outer != name:
                self.order.setdefault(outer, set()).add(name)
        held.append(name)

    def gave(self, name):
        held = self.held()
        if name in held:
            del held[len(held) - 1 - held[::-1].index(name)]

    def require_order(self):
        """AssertionError if two threads could wait for each other: locks taken in a circle."""
        path, done = [], set()

        def visit(name):
            assert name not in path, f"taken in a circle: {path[path.index(name) :]}"
            if name in done:
                return
            path.append(name)
            for inner in sorted(self.order.get(name, ())):
                visit(inner)
            path.pop()
            done.add(name)

        for name in sorted(self.order):
            visit(name)


class _Lock:
    """In the place of a Lock."""

    def __init__(self, inner, name, seen):
        self._inner, self._name, self._seen = inner, name, seen

    def acquire(self, *arguments, **named):
        taken = self._inner.acquire(*arguments, **named)
        if taken:
            self._seen.took(self._name)
        return taken

    def release(self):
        self._seen.gave(self._name)
        self._inner.release()

    def locked(self):
        return self._inner.locked()

    __enter__ = acquire

    def __exit__(self, *_):
        self.release()


class _RLock(_Lock):
    """The same of an RLock, of which Condition asks more."""

    def _is_owned(self):
        return self._inner._is_owned()

    def _release_save(self):
        self._seen.gave(self._name)
        return self._inner._release_save()

    def _acquire_restore(self, state):
        self._inner._acquire_restore(state)
        self._seen.took(self._name)


@contextlib.contextmanager
def watched():
    seen, lock, rlock = Seen(), threading.Lock, threading.RLock
    begin = {way: getattr(threads, way) for way in _USERS}

    def making(plain, kind):
        def make():
            frame = sys._getframe(1)
            while frame.f_globals.get("__name__") == "threading":  # a Condition's own
                frame = frame.f_back
            name = frame.f_globals.get("__name__", "")
            return kind(plain(), f"{name}:{frame.f_lineno}", seen) if name.startswith("c10d_custom.") else plain()

        return make

    def starting(way):
        def start(target, name):
            seen.started_under.update((name.split(":")[0], held) for held in seen.held())
            return begin[way](target, name)

        return start

    threading.Lock, threading.RLock = making(lock, _Lock), making(rlock, _RLock)
    for way, modules in _USERS.items():
        for module in modules:
            setattr(module, way, starting(way))
    try:
        yield seen
    finally:
        threading.Lock, threading.RLock = lock, rlock
        for way, modules in _USERS.items():
            for module in modules:
                setattr(module, way, begin[way])
