"""Tickets of operations that Python carries out, and the queue that runs collectives in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from ctypes import addressof, c_uint64
from typing import TYPE_CHECKING

from ..errors import AbortedError
from ..native import lib
from ..threads import Lent, lend, threading
from . import Ticket

if TYPE_CHECKING:
    from ..call import Call
    from . import Transport


_LINGER = 0.05  # s without a job, after which a Queue gives its thread back


class PyTicket(Ticket):
    """``complete``: called with the token that was asked for, once done."""

    def __init__(self, complete: Callable[[int], None]) -> None:
        self._complete = complete
        self._changed = threading.Condition()  # of an RLock: a signal handler may end it amid a step of its own thread
        self._done = False
        self._error: BaseException | None = None
        self._token: int | None = None
        self._source = -1

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        with self._changed:
            if not self._done:
                self._error, self._source, self._done = error, source, True
                self._changed.notify_all()
        token, self._token = self._token, None
        if token is not None:
            try:
                self._complete(token)
            except BaseException:  # a signal handler's; a token that comes twice is known the first time only
                self._complete(token)
                raise

    def done(self) -> bool:
        return self._done

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        if not self._done:
            with self._changed:
                self._changed.wait_for(lambda: self._done, seconds)
        return self._done

    def error(self) -> BaseException | None:
        return self._error

    def watch(self, token: int) -> bool:
        with self._changed:
            if self._done:
                return False
            self._token = token
            return True

    def withdraw(self) -> None:
        raise NotImplementedError  # of those that are under way

    @property
    def source(self) -> int:
        return self._source


class QueuedTicket(PyTicket):
    """A collective in a Queue; whoever waits for it may run what the queue holds."""

    collective = True

    def __init__(self, complete: Callable[[int], None], queue: Queue) -> None:
        super().__init__(complete)
        self._queue = queue

    def withdraw(self) -> None:
        self._queue.owner.interrupt()  # what is under way ends, and what waits fails in its turn
        while not self.wait(0.1, may_run=True):
            pass

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        may_run = may_run or not self._queue.has_thread()
        while may_run and not self._done and self._queue.run_next():
            pass
        return super().wait(seconds)

    def watch(self, token: int) -> bool:
        while not self._done and not self._queue.has_thread() and self._queue.run_next():
            pass
        return super().watch(token)


class Queue:
    """Runs jobs one at a time in the order of their numbers, each in the thread that asks for it if nothing is under
    way, else in one that is lent to the queue. ``execute(number, call)`` returns an error or None; it does not raise.
    ``complete``: see PyTicket. ``sequencer``: the address of a sequencer (backend/hosts/sequencer.h) that others take,
    too: whoever frees it calls `wake` if somebody waits. ``owner``: the transport whose collectives these are."""

    def __init__(
        self,
        execute: Callable[[int, Call], BaseException | None],
        complete: Callable[[int], None],
        name: str,
        owner: Transport,
        sequencer: int | None = None,
    ) -> None:
        self.owner = owner
        self._execute, self._complete, self._name = execute, complete, name
        self._words = (c_uint64 * 2)()
        self._sequencer = addressof(self._words) if sequencer is None else sequencer
        self._changed = threading.Condition()  # of an RLock: see PyTicket
        self._jobs: deque[tuple[int, Call, QueuedTicket]] = deque()  # as many as wait for their turn
        self._starts = self._closing = False
        self._thread: Lent | None = None
        self._here = threading.local()  # .taken: for each frame of this thread that runs a job, [its number] or []

    @property
    def number(self) -> int:
        """The number of the last collective issued."""
        return lib.c10d_sequencer_last(self._sequencer)

    def has_turn_here(self) -> bool:
        """Whether a frame of this thread has the turn: what is called on top of it, by a signal handler, would wait for
        it in vain."""
        under_way = lib.c10d_sequencer_under_way(self._sequencer)
        return under_way != 0 and any(taken == [under_way] for taken in self._taken_here())

    def _taken_here(self) -> list[list[int]]:
        """A list of each frame of this thread that is in `run`: the number whose turn it has. The list
        is there a little before the turn is taken, empty, and a little after it is freed, when its number is no longer
        the one under way."""
        try:
            return self._here.taken
        except AttributeError:
            return self._here.__dict__.setdefault("taken", [])

    def run(self, call: Call) -> BaseException | None:
        taken: list[int] = []
        ticket = None
        try:
            self._taken_here().append(taken)
            with self._changed:
                taken.extend(
                    map(lib.c10d_sequencer_take, (self._sequencer,))
                )  # no signal handler runs before it is in the list
                if not taken[0]:
                    if self.owner.interrupted_here():
                        return self.owner.inside(call.name)  # it would wait for its own outer frame
                    ticket = self._enqueue(call)
            if ticket is None:
                return self._execute(taken[0], call)
            self._ensure_thread()
            while not ticket.wait(0.1, may_run=True):  # in slices: signal handlers run between them
                pass
            return ticket.error()
        except BaseException:
            if ticket is not None:
                ticket.withdraw()
            elif taken:
                # It has a number, or is queued, so that the others wait for it, and nobody here will carry it out.
                self.owner.abort()
            raise
        finally:
            if taken and taken[0]:
                self._free()
            self._forget(taken)

    def submit(self, call: Call) -> QueuedTicket:
        if self.owner.interrupted_here():
            raise self.owner.inside(call.name)
        with self._changed:
            ticket = self._enqueue(call)
        self._ensure_thread()
        while self._closing and self.run_next():  # it fails, the group being over
            pass
        return ticket

    def run_next(self) -> bool:
        """Runs the oldest job here. False: another thread is at it, or there is none."""
        begun: list[int] = []
        job: list[tuple[int, Call, QueuedTicket]] = []
        error: BaseException | None = None
        try:
            self._taken_here().append(begun)
            with self._changed:
                begun.extend(map(lib.c10d_sequencer_next, (self._sequencer,)))
                if not begun[0]:
                    return False
                job.extend(map(deque.popleft, (self._jobs,)))
            number, call, ticket = job[0]
            error = self._execute(number, call)
            return True
        except BaseException:
            self.owner.abort()
            error = AbortedError(f"{job[0][1].name if job else 'a collective'}: a signal handler raised amid it")
            raise
        finally:
            if begun and begun[0]:
                self._free()
                for _, _, ticket in job:
                    ticket.finish(error)
            self._forget(begun)

    def queued(self) -> list[tuple[int, Call]]:
        """(number, Call) of what has not begun."""
        return [(number, call) for number, call, _ in self._jobs.copy()]

    def has_thread(self) -> bool:
        """Whether what is queued is carried out though nobody waits for it."""
        return self._starts

    def idle(self) -> bool:
        """Returns whether nothing is under way, nor waits."""
        return not self._jobs and not lib.c10d_sequencer_under_way(self._sequencer)

    def close(self) -> None:
        """Runs what is left (it fails at once, the group being over), and ends the thread."""
        with self._changed:
            self._closing = True
            lib.c10d_sequencer_close(self._sequencer)
            self._changed.notify_all()
        while not self.has_thread() and self.run_next():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not lib.c10d_sequencer_under_way(self._sequencer) and not self._jobs, 5.0)
        if self._thread is not None and not self._thread.is_here():
            self._thread.join(5.0)
        while self.run_next():
            pass

    def wake(self) -> None:
        """Wakes who waits for the turn, which is free now."""
        with self._changed:
            self._changed.notify_all()

    def _enqueue(self, call: Call) -> QueuedTicket:
        ticket = QueuedTicket(self._complete, self)
        self._jobs.append((lib.c10d_sequencer_wait(self._sequencer), call, ticket))
        self._changed.notify_all()
        return ticket

    def _ensure_thread(self) -> None:
        """Without the lock, which nobody holds while a thread starts."""
        with self._changed:
            if self._starts or self._closing:
                return
            self._starts = True
        try:
            self._thread = lend(self._work, f"c10d_custom:{self._name}")
        except RuntimeError:  # the system has no more: who waits, or issues the next, carries out what is queued
            self._starts = False

    def _forget(self, taken: list[int]) -> None:
        here = self._taken_here()
        here[:] = [other for other in here if other is not taken]

    def _free(self) -> None:
        if lib.c10d_sequencer_free(self._sequencer):
            self.wake()

    def _work(self) -> None:
        while True:
            with self._changed:
                ready = self._changed.wait_for(
                    lambda: (self._jobs or self._closing) and not lib.c10d_sequencer_under_way(self._sequencer), _LINGER
                )
                if not self._jobs and (self._closing or not ready):
                    self._starts = False
                    return
            self.run_next()
