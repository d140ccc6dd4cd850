"""Work handles and their futures; and the threads that end Works which nobody waits for and run the callbacks of their
futures. Those may wait for another collective: so it is never the thread that runs the queued collectives."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work as _TorchWork

from ..errors import AbortedError, CollectiveTimeoutError, TransportError, UsageError
from ..threads import GPU, Lent, lend, threading, time, wait_until
from .torch_private import register_work

if TYPE_CHECKING:
    from torch.futures import Future

    from ..call import StreamOp
    from ..transport import Ticket, Transport


# How long a wait sleeps before it lets Python's signal handlers run.
_SLICE = 0.1


class _Failure:
    """The value of an inner future whose operation has failed. A future of a device looks for tensors in it by
    pickling."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None = None) -> None:
        self.error: Any = error  # None in a copy only

    def __reduce__(self) -> tuple[type[_Failure], tuple[()]]:
        return _Failure, ()


def _value(done: Future[Any]) -> Any:
    value = done.value()
    if isinstance(value, _Failure):
        raise type(value.error)(*value.error.args)  # a new one: this frame is not to live on in its traceback
    return value


def _can_fail(inner: Future[Any]) -> Future[Any]:
    """The future to hand out for ``inner``. Future.set_exception is for callers in Python: one in C++, as DDP's
    Reducer, would take the exception for the tensors, and crash. What a callback raises fails a future for both (as a
    RuntimeError that quotes it)."""
    return inner.then(_value)


class DoneWork(_TorchWork):
    """A synchronous operation, over when the caller gets to see it."""

    def __init__(self, tensors: list[torch.Tensor], stream_op: StreamOp | None = None) -> None:
        super().__init__()
        self._tensors = tensors
        self._stream_op = stream_op  # of tensors on a device: the current stream waits for it already

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        pass

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Future[Any]:
        future: Future[Any]
        if self._stream_op is not None:
            future = self._stream_op.future([self._stream_op])
            self._stream_op.resolve(future, self._tensors, [self._stream_op])
            return future
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class DoneMessage(DoneWork):
    """A message that is over. ``source``: the rank that a received one is from, else -1."""

    def __init__(self, tensors: list[torch.Tensor], source: int) -> None:
        super().__init__(tensors)
        self._source = source

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


class Work(_TorchWork):
    """One or more operations under way. It ends when all have; then ``finish`` runs, once, in
    whichever thread comes first, and is told whether all went well (it copies results to where the caller wants them,
    say).

    tickets: transport Tickets. tensors: what result() and the future give. keep: whatever must
    stay alive until the end.
    """

    # Until it is said otherwise, of each: setting them takes time.
    _settling = _over = _wanted = False
    _error: BaseException | None = None
    _graph_inputs: Sequence[torch.Tensor] = ()
    stream_ops: Sequence[StreamOp] = ()  # of a DeviceWork: what tells of the GPU's side, one for each operation

    def __init__(
        self,
        completer: Completer,
        tickets: Sequence[Ticket],
        tensors: list[torch.Tensor],
        finish: Callable[[bool], None] | None,
        keep: object,
    ) -> None:
        super().__init__()
        self._completer = completer
        self._tickets = tickets
        self._tensors = tensors
        self._finish = finish
        self._keep = keep
        self._lock = threading.RLock()  # taken twice where a signal handler ends the group amid `settle`
        self._futures: list[Future[Any]] = []

    # --- torch.distributed.Work

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if not self._over:
            for ticket in self._tickets:
                if not ticket.done():
                    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
                    self._await(seconds if seconds and seconds > 0 else None)
                    break
            else:
                self.settle()
        if self._graph_inputs:
            self._forget_graph_inputs()
        if self._error is not None:
            raise self._error
        return True

    # --- torch.distributed._functional_collectives.allow_inflight_collective_as_graph_input_ctx

    def become_graph_inputs(self, register: bool) -> None:
        """A compiled graph that is given this Work's tensors may wait for them (wait_tensor), as for those of c10d's
        own Works. ``register``: enter it into torch's registry, where torch does not do that; which keeps the object
        in C++ only (see `_REMEMBERED`): the completer keeps the one in Python."""
        self._graph_inputs = self._tensors
        if register and register_work is not None:
            self._completer.held.add(self)
            for tensor in self._tensors:
                register_work(tensor, self)

    def _forget_graph_inputs(self) -> None:
        tensors, self._graph_inputs = self._graph_inputs, ()  # first: wait_tensor comes back here
        for tensor in tensors:
            torch.ops._c10d_functional.wait_tensor(tensor)  # the only way out of torch's registry
        self._completer.held.discard(self)

    def is_completed(self) -> bool:
        if self.has_ended():
            return True
        if not self._wanted:
            self._want()  # whoever asks may go on asking until it is done
        return False

    def has_ended(self) -> bool:
        """Returns what is_completed does, for a caller that will not wait for the operation."""
        if not self._over:
            for ticket in self._tickets:
                if not ticket.done():
                    return False
            self.settle()
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        return self._tickets[0].source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        future = self._new_future()
        self._futures.append(future)  # before the look whether it is over: whoever ends it then sees this one, or we do
        if self._over:
            self._resolve_futures()
        else:
            self._want()
            self._completer.watch(self)
        return future if self._error is None and future.done() else _can_fail(future)

    def _new_future(self) -> Future[Any]:
        return torch.futures.Future()

    def _want(self) -> None:
        self._wanted = True
        for ticket in self._tickets:
            ticket.want()

    # --- the end

    def end(self) -> None:
        """Waits until it is over; its error is for `wait` to raise."""
        self._await(None)

    def _await(self, seconds: float | None) -> None:
        """Waits until all is over and settled. An exception that a signal handler raises meanwhile leaves nothing
        behind that would still touch the tensors: what is not over is withdrawn first (transport/__init__.py)."""
        self._completer.refuse_inside(self._tickets)
        if len(self._tickets) > 1:
            self._want()  # all, not each in its turn
        try:
            late = self._await_tickets(None if seconds is None else time.monotonic() + seconds)
        except BaseException as raised:
            self._withdraw()
            if isinstance(self._error, AbortedError):
                with contextlib.suppress(Exception):  # of a class that cannot be copied
                    self._error.__cause__ = copy.copy(raised)  # without its frames, which keep this Work
            raise
        if late is not None:
            what, waits = late.standing()
            raise CollectiveTimeoutError(
                f"{what}: not done after the {seconds:g} s given to wait(); it goes on until its own time-out. {waits}"
            )
        self.settle()

    def _await_tickets(self, deadline: float | None) -> Ticket | None:
        """Waits for all tickets. Returns the first that was not done at the deadline, or None."""
        for ticket in self._tickets:
            if deadline is None:
                while not ticket.wait(_SLICE, True):
                    pass
                continue
            while not ticket.wait(max(min(_SLICE, deadline - time.monotonic()), 0.0)):
                if time.monotonic() >= deadline:
                    return ticket
        return None

    def _withdraw(self) -> None:
        for ticket in self._tickets:
            if not ticket.done():
                ticket.withdraw()
        self.settle()

    def settle(self) -> None:
        """All tickets are done: run `finish`, drop what was kept, resolve the futures."""
        with self._lock:
            if self._over or self._settling:  # the latter: by an outer frame, below a signal handler
                return
            self._settling = True
            try:
                for ticket in self._tickets:
                    if (error := ticket.error()) is not None:
                        self._error = error
                        break
                if self._finish is not None:
                    self._finish(self._error is None)
            except BaseException as error:  # what a signal handler raises, too: `wait` raises it
                self._error = error
            self._finish = None
            self._over = True
        try:
            self._let_go()
        finally:
            if self._futures:
                self._resolve_futures()

    def _resolve_futures(self) -> None:
        futures, self._futures = self._futures, []  # no signal handler, and no other thread, runs amid this line
        try:
            for future in futures:
                self._resolve(future)
        except BaseException:
            for future in futures:
                if not future.done():
                    self._resolve(future)
            raise

    def _let_go(self) -> None:
        self._keep = None
        self._completer.forget(self)

    def _resolve(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_result(_Failure(self._error))
        else:
            future.set_result(self._tensors)


class DeviceWork(Work):
    """Work on tensors of a device. It is settled when the GPU has been told of all of it: then futures resolve,
    and `wait` lets the current stream wait for the rest. ``stream_ops``: what tells of the GPU's side, one for
    each operation. What is kept for a call, plain copies of its tensors say, has memory of the stream on which it was
    issued, which the allocator hands out again in that stream's order. So it is let go once that stream waits for the
    Work, or the GPU is done: another stream's wait is not enough."""

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        began = time.monotonic()
        super().wait(timeout)
        for stream_op in self.stream_ops:
            stream_op.join()
        if seconds and seconds > 0:
            self._await_gpu(began, seconds)
            super()._let_go()
        elif all(f.joined_at_home() for f in self.stream_ops):
            super()._let_go()
        return True

    def has_ended(self) -> bool:
        if not super().has_ended():
            return False
        if self._error is None and not all(f.completed() for f in self.stream_ops):
            return False
        super()._let_go()
        return True

    def _get_duration(self) -> float:
        """Milliseconds on the GPU."""
        if not self.is_completed():
            raise UsageError("Work._get_duration: it is not done yet")
        times = [took for f in self.stream_ops if (took := f.duration()) is not None]
        if not times:
            raise UsageError("Work._get_duration: the group's calls are timed after its _enable_collectives_timing()")
        return max(times)

    def _await_gpu(self, began: float, seconds: float) -> None:
        left = began + seconds - time.monotonic()
        if not wait_until(lambda: all(f.completed() for f in self.stream_ops), GPU, left):
            raise CollectiveTimeoutError(f"Work.wait: the GPU is not done after the {seconds:g} s given to wait()")

    def _let_go(self) -> None:
        if self._error is not None:
            super()._let_go()

    def _new_future(self) -> Future[Any]:
        return self.stream_ops[0].future(self.stream_ops)

    def _resolve(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_result(_Failure(self._error))
        else:
            self.stream_ops[0].resolve(future, self._tensors, self.stream_ops)


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
        self.held: set[Work] = set()  # Works that torch's registry of graph inputs has: kept alive for it
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

    def disown(self, failed: Ticket) -> list[Any]:
        """In a forked child, where nobody ends them: Works under way end as ``failed`` has. Returns what of them must
        not be freed."""
        works = [work for work in list(self._in_flight) if not all(ticket.done() for ticket in work._tickets)]
        kept = [work._tickets for work in works]
        for work in works:
            work._tickets = [failed]
        return kept

    def forget(self, work: Work) -> None:
        self._in_flight.pop(work, None)  # a step that nothing interrupts; `_sweep` knows that it comes at any moment

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
