"""The threads that end Works that nobody waits for and run the callbacks of their futures, which may wait for another
collective: so it is never the thread that runs the queued collectives."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import AbortedError, TransportError
from ..threads import Lent, lend, threading

if TYPE_CHECKING:
    import torch

    from ..transport.base import Ticket, Transport
    from .work import Work


# A Work that C++ alone refers to (DDP.join keeps one from forward to backward) loses its Python half,
# and so its methods, when Python drops it (pytorch#79176): the last few tiny ones are kept.
_REMEMBERED = 64
_TINY = 64  # bytes, of each tensor

# How many unfinished Works are looked at with each new one.
_SWEEP = 4

# s that a thread keeps looking for what ends: while somebody is to be told of it, and when nobody is.
_LOOK, _LINGER = 1.0, 0.01

# How long to wait for a callback of a future that does not return (the thread is a daemon).
_JOIN = 5.0


def _are_tiny(tensors: Sequence[torch.Tensor]) -> bool:
    for t in tensors:
        if t.is_sparse or t.nbytes > _TINY:
            return False
    return True


class Completer:
    """Ends Works that nobody waits for: those with a future, or with something to do at the end.

    Callbacks of a future run in the thread that completes it and may wait for further operations of
    the same group, so there is always one more thread than there are callbacks running. They are lent for as long as
    there is a Work to be ended, and a moment more.

    A signal handler may run between any two steps of the main thread, and use the group there. So the lock may be taken
    twice by one thread, is held for a few steps only, and never while a thread starts or ends, or a callback runs."""

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport, self._name = transport, name
        self._lock = threading.RLock()
        self._tokens = itertools.count(1)
        self._watched: dict[int, tuple[Work, int]] = {}  # token -> (work, index of the ticket it stands for)
        self._in_flight: OrderedDict[Work, None] = OrderedDict()  # keeps Works, with their tensors, until they end
        self._remembered: deque[Work] = deque(maxlen=_REMEMBERED)
        self._held: set[Work] = set()  # Works that torch's registry of graph inputs has
        self._idle = 0
        self._threads: set[Lent] = set()

    def keep(self, work: Work) -> None:
        """Keeps ``work`` alive until it ends."""
        if self._in_flight:
            self._sweep()
        self._in_flight[work] = None

    def _sweep(self) -> None:
        """Lets Works go that nobody waits for, a few at each call: the oldest, up to one that is not done."""
        for _ in range(_SWEEP):
            try:
                oldest = next(iter(self._in_flight))
                self._in_flight.move_to_end(oldest)  # the next time, another one is looked at first
            except (StopIteration, RuntimeError, KeyError):  # there is none, or another thread adds or takes some
                return
            if not oldest.has_ended():
                return
            self.forget(oldest)

    def adopt(self, work: Work, eager: bool) -> None:
        """The same of a Work that C++ may have; ``eager``: sees to its end, too."""
        self.keep(work)
        if _are_tiny(work._tensors):
            self._remembered.append(work)
        if eager:
            self.watch(work)

    def refuse_inside(self, tickets: Sequence[Ticket]) -> None:
        """UsageError if one of them is a collective that waits for this thread's own outer frame."""
        if self._transport.interrupted_here():
            for ticket in tickets:
                if ticket.collective and not ticket.done():
                    raise self._transport.inside("Work.wait of a collective")

    def forget(self, work: Work) -> None:
        self._in_flight.pop(work, None)  # a step that nothing interrupts; `_sweep` knows that it comes at any moment

    def hold(self, work: Work) -> None:
        """Keeps ``work`` alive until `release`."""
        self._held.add(work)

    def release(self, work: Work) -> None:
        self._held.discard(work)

    def watch(self, work: Work, index: int = 0) -> None:
        """Settles ``work`` once its tickets, from ``index`` on, are done."""
        while index < len(work._tickets):
            ticket = work._tickets[index]
            token = next(self._tokens)
            with self._lock:
                self._watched[token] = (work, index)
            if ticket.watch(token):
                if not self._idle:
                    try:
                        self._start()
                    except TransportError:
                        if not ticket.collective:  # a message may wait for what this thread does next
                            raise
                        work.end()
                return
            with self._lock:
                self._watched.pop(token, None)
            index += 1
        work.settle()

    def wait_all(self, seconds: float) -> None:
        """Waits for every Work under way, each for up to ``seconds``."""
        for work in list(self._in_flight):
            work.wait(seconds)

    def close(self) -> None:
        """Ends the threads; the transport has left, so nothing keeps them."""
        # One that ends may have started another; and one that is still at the end of a callback when the interpreter
        # goes away takes the process with it.
        until = time.monotonic() + _JOIN
        while (threads := self._others()) and time.monotonic() < until:
            threads[0].join(until - time.monotonic())
        for work in list(self._in_flight):
            work.settle()
        self._remembered.clear()

    def _others(self) -> list[Lent]:
        with self._lock:
            return [t for t in self._threads if t.is_alive() and not t.is_here()]

    def drop_all(self) -> None:
        """The transport is closed: nothing uses what unfinished Works have kept."""
        with self._lock:
            self._in_flight.clear()

    def _start(self) -> None:
        with self._lock:
            self._idle += 1
        try:
            thread = lend(self._run, f"c10d_custom:{self._name}")
        except RuntimeError as error:
            with self._lock:
                self._idle -= 1
            raise TransportError(f"group {self._name}: no thread for its futures: {error} (ulimit -u)") from error
        with self._lock:
            self._threads = {t for t in self._threads if t.is_alive()} | {thread}

    def _run(self) -> None:
        try:
            while True:
                token = self._transport.next_completed(_LOOK if self._watched else _LINGER)
                with self._lock:
                    if token is None:
                        if self._watched:
                            continue
                        self._idle -= 1
                        return
                    work, index = self._watched.pop(token, (None, 0))
                    self._idle -= 1
                    last = not self._idle
                if last:
                    with contextlib.suppress(TransportError):  # then callbacks have to wait for this one
                        self._start()
                if work is not None:
                    self.watch(work, index + 1)
                work = None
                with self._lock:
                    if self._idle >= 2:  # enough of us wait already
                        return
                    self._idle += 1
        except AbortedError:
            pass
