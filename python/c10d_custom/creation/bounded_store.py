"""A c10d Store, each call of which ends by a deadline; and which of torchrun's starts of the ranks this is.

A TCPStore whose server is stopped, or behind a network that is cut, does not answer, and its time-out holds for few of
its calls. So a thread of its own makes them, and whoever asks waits for the answer as long as there is time. A thread
that got none stays behind until the server answers or its connection ends. A process that exits waits a few seconds for
such threads: up to Python 3.13, one whose call returns while the interpreter ends would abort the process. Where no
thread can be had, who asks makes the call, which then ends as the store has it end.

torchrun starts all ranks again after a failure, and may keep one store over all attempts: what the ranks of an earlier
one said is still there. Neither of two counts tells attempts apart: each host's agent leaves out restarts that another
host has caused, and a rank that failed before it came here has left nothing to count.

So rank 0 of the default group announces a new name, under which all of its ranks meet. Another rank takes the name that
it finds and, as long as it waits for rank 0, looks whether there is a newer one. What rank 0 decided, or somebody gave
up, before this rank came is an earlier attempt's: all ranks of an attempt start after all of the one before have ended.

Groups over processes of several jobs meet in the same way, whoever started those: one job may have been started again,
and the other not. There, ranks of an earlier attempt may wait beside those of a newer one: they go over to it."""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Callable
from typing import Any, Self

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from ..errors import TransportError
from ..threads import allocate_lock, queue, start_new_thread, time

_LEAST = 1.0  # s: for a call that is made at the deadline or after it, such as the last word of a rank that gives up
_AT_EXIT = 3.0  # s: longer than a call goes on that has lost its connection
_left_behind: list[tuple[int, Any]] = []  # of threads amid a call that nobody waits for: PID, `_Answer.awaited`


def whole(store: Any) -> Any:
    """``store``, or, if its class in Python lacks what a group's creation asks for, a LeastStore over it."""
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if type(inner) is Store or isinstance(inner, (TCPStore, FileStore, HashStore)) or not isinstance(inner, Store):
        return store  # of C++, or none at all
    kinds = type(inner).__mro__
    own = {name for kind in kinds[: kinds.index(Store)] for name in vars(kind)}
    if own >= {"compare_set", "deleteKey"}:  # C++ looks for the latter; `delete_key` is for callers in Python
        return store
    from .least_store import LeastStore

    return LeastStore(store)


class BoundedStore:
    """Of ``store``. Its calls raise TransportError at ``deadline`` (time.monotonic), and at once after one that did.
    ``close`` ends its thread; after that there is ``plain``, the Store itself."""

    def __init__(self, store: Store, deadline: float, what: str) -> None:
        self.plain, self.deadline = store, deadline
        self._what = what  # is being done, for errors
        self._asker = _Asker()

    def under(self, prefix: str) -> Self:
        """The part of it whose keys begin so."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__, plain=PrefixStore(prefix, self.plain))
        return part

    def of(self, store: Store) -> Self:
        """The same for another part of the same Store."""
        part = self.under("")
        part.plain = store
        return part

    def set(self, key: str, value: str) -> None:
        self._ask(self.plain.set, key, value)

    def get(self, key: str) -> bytes:
        return self._ask(self.plain.get, key)

    def check(self, keys: list[str]) -> bool:
        return self._ask(self.plain.check, keys)

    def append(self, key: str, value: str) -> None:
        self._ask(self.plain.append, key, value)  # type: ignore[attr-defined]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(self.plain.compare_set, key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._ask(self.plain.delete_key, key)

    def broke(self, error: BaseException) -> TransportError:
        """The error for one of the store's own, which says neither whose call it ended nor where the store is."""
        return TransportError(
            f"{self._what}: the store broke: {error} It is {_whereabouts(self.plain)}. Has the process that serves it "
            "(rank 0, or the launcher's agent) ended?"
        )

    def close(self) -> None:
        self._asker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if not self._asker.ask(answer := _Answer(call, arguments), self.deadline):
            raise TransportError(
                f"{self._what}: the store has not answered for {self._asker.silent:.1f} s. It is "
                f"{_whereabouts(self.plain)}. Is the process that serves it (rank 0, or the launcher's agent) "
                "stopped, or the network "
                "to it cut?"
            )
        return answer.given()


def answered(call: Callable[[], Any], seconds: float) -> Any:
    """What ``call`` of a store returns; TransportError after so long, a second at least."""
    asker = _Asker()
    try:
        if not asker.ask(answer := _Answer(call, ()), time.monotonic() + seconds):
            raise TransportError(f"silent for {asker.silent:.1f} s: stopped, or the network to it cut?")
        return answer.given()
    finally:
        asker.end()


@atexit.register
def _await_those_left_behind() -> None:
    until = time.monotonic() + _AT_EXIT
    for pid, awaited in _left_behind:
        if pid == os.getpid():  # a forked child has no such thread
            awaited.acquire(timeout=max(until - time.monotonic(), 0))


class _Answer:
    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.call, self.arguments = call, arguments
        self.awaited = allocate_lock()  # until it is there: nobody holds it
        self.awaited.acquire()
        self.value: Any = None
        self.error: Exception | None = None

    def make(self) -> None:
        try:
            self.value = self.call(*self.arguments)
        except Exception as error:
            self.error = error
        self.awaited.release()

    def given(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class _Asker:
    """The thread that calls the store, and what it has been asked."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._runs = False  # a group that asks nothing needs no thread
        self.silent = 0.0  # s: that a call was waited for in vain

    def ask(self, answer: _Answer, deadline: float) -> bool:
        """Waits for the answer; False if none came in time."""
        if not self._runs:
            # Not a threading.Thread, whose start takes as long as five calls. It is never joined.
            try:
                start_new_thread(self._run, ())
            except RuntimeError:  # none to be had; the other ranks must not wait for it
                answer.make()
                return True
            self._runs = True
        if not self.silent:
            began = time.monotonic()
            self._asked.put(answer)
            if answer.awaited.acquire(timeout=max(deadline - began, _LEAST)):
                return True
            self.silent = time.monotonic() - began
            _left_behind[:] = [(pid, lock) for pid, lock in _left_behind if lock.locked()]
            _left_behind.append((os.getpid(), answer.awaited))
        return False

    def end(self) -> None:
        if self._runs:
            self._asked.put(None)

    def _run(self) -> None:
        while (answer := self._asked.get()) is not None:
            answer.make()


def _whereabouts(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return f"a {type(store).__name__} at {host}, port {port}" if host else f"a {type(store).__name__}"


KEY = "attempt"
_PAUSE = 5e-3  # s


class SupersededError(Exception):
    """A newer attempt has been announced than the one whose ranks this one waits for."""


class Attempt:
    """``what``: is being done, for errors."""

    def __init__(self, store: BoundedStore, rank: int, what: str) -> None:
        self._store, self._rank, self._what = store, rank, what
        self._settled = False
        self.name = ""

    @staticmethod
    def possible() -> bool:
        """Whether a launcher may start the ranks again over the same store."""
        return "TORCHELASTIC_RESTART_COUNT" in os.environ

    def join(self) -> str:
        """The name: rank 0's own, or the first that differs from that of the attempt joined before."""
        if self._rank == 0:
            self.name = uuid.uuid4().hex
            self._store.set(KEY, self.name)
            return self.name
        before, started = self.name, time.monotonic()
        while not (self._store.check([KEY]) and (found := self._announced()) != before):
            if time.monotonic() >= self._store.deadline - _PAUSE:
                raise TransportError(
                    f"{self._what}: heard nothing from rank 0 for {time.monotonic() - started:.1f} s"
                    f"{' but what an earlier attempt of the job has left' if before else ''}; did it start, and does "
                    "it call init_process_group (or what makes this group)? Not there yet: rank 0."
                )
            time.sleep(_PAUSE)
        self.name = found
        return found

    def look(self) -> None:
        """Raises SupersededError, until the attempt is settled."""
        if self._settled or self._announced() == self.name:
            return
        if self._rank == 0:
            raise TransportError(
                f"{self._what}: the job's ranks have been started again, and this process is of an earlier attempt (or "
                "two processes were given rank 0)"
            )
        raise SupersededError

    def settle(self) -> None:
        """Called once all ranks of the attempt have met: `look` raises no more."""
        self._settled = True

    def _announced(self) -> str:
        return self._store.get(KEY).decode()
