"""Work handles, their futures, and the threads that complete what must be completed in Python."""

import contextlib
import itertools
import threading
import time
from collections import deque
from datetime import timedelta

import torch
from torch.distributed import Work as _TorchWork

from ..errors import AbortedError, CollectiveTimeoutError, TransportError
from ..threads import start
from .optional import optional

# A Work that C++ alone refers to (DDP.join keeps one from forward to backward) loses its Python half,
# and so its methods, when Python drops it (pytorch#79176): the last few tiny ones are kept.
_REMEMBERED = 64
_TINY = 64  # bytes, of each tensor

# How many unfinished Works are looked at with each new one.
_SWEEP = 4

# How long to wait for a callback of a future that does not return (the thread is a daemon).
_JOIN = 5.0

# How long a wait for the GPU sleeps before it asks again.
_GPU_STEP = 50e-6

# How long a wait sleeps before it lets Python's signal handlers run.
_SLICE = 0.1


def _never():
    return False


# Whether we are in torch's allow_inflight_collective_as_graph_input_ctx.
works_are_graph_inputs, _register_work = _never, None
with optional("collectives under way as inputs of compiled graphs"):
    from torch._C._distributed_c10d import _register_work


class _Failure:
    """The value of an inner future whose operation has failed. A future of a device looks for tensors in it by
    pickling."""

    __slots__ = ("error",)

    def __init__(self, error=None):
        self.error = error

    def __reduce__(self):
        return _Failure, ()


def _value(done):
    value = done.value()
    if isinstance(value, _Failure):
        raise type(value.error)(*value.error.args)  # a new one: this frame is not to live on in its traceback
    return value


def _can_fail(inner):
    """The future to hand out for ``inner``. Future.set_exception is for callers in Python: one in C++, as DDP's
    Reducer, would take the exception for the tensors, and crash. What a callback raises fails a future for both (as a
    RuntimeError that quotes it)."""
    return inner.then(_value)


class DoneWork(_TorchWork):
    """A synchronous operation, over when the caller gets to see it."""

    def __init__(self, tensors, stream_op=None):
        super().__init__()
        self._tensors = tensors
        self._stream_op = stream_op  # of tensors on a device: the current stream waits for it already

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def is_success(self):
        return True

    def exception(self):
        return None

    def synchronize(self):
        pass

    def result(self):
        return self._tensors

    def get_future(self):
        if self._stream_op is not None:
            future = self._stream_op.future()
            self._stream_op.resolve(future, self._tensors, [self._stream_op])
            return future
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class DoneMessage(DoneWork):
    """A message that is over. ``source``: the rank that a received one is from, else -1."""

    def __init__(self, tensors, source):
        super().__init__(tensors)
        self._source = source

    def source_rank(self):
        return self._source

    _source_rank = source_rank


class Work(_TorchWork):
    """One or more operations under way. It ends when all have; then ``finish`` runs, once, in
    whichever thread comes first (it copies results to where the caller wants them, say).

    tickets: transport Tickets. tensors: what result() and the future give. keep: whatever must
    stay alive until the end.
    """

    def __init__(self, completer, tickets, tensors, finish, keep):
        super().__init__()
        self._completer = completer
        self._tickets = tickets
        self._tensors = tensors
        self._finish = finish
        self._keep = keep
        self._lock = threading.RLock()  # taken twice where a signal handler ends the group amid `settle`
        self._settling = self._over = False
        self._error = None
        self._futures = []
        self._graph_inputs = ()

    # --- torch.distributed.Work

    def wait(self, timeout=None):
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._await(seconds if seconds and seconds > 0 else None)
        if self._graph_inputs:
            self._forget_graph_inputs()
        if self._error is not None:
            raise self._error
        return True

    # --- torch.distributed._functional_collectives.allow_inflight_collective_as_graph_input_ctx

    def become_graph_inputs(self, register):
        """A compiled graph that is given this Work's tensors may wait for them (wait_tensor), as for those of c10d's
        own Works. ``register``: enter it into torch's registry, where torch does not do that; as this does not keep our
        half of a Work alive, the completer does."""
        self._graph_inputs = self._tensors
        if register:
            self._completer.hold(self)
            for tensor in self._tensors:
                _register_work(tensor, self)

    def _forget_graph_inputs(self):
        tensors, self._graph_inputs = self._graph_inputs, ()  # first: wait_tensor comes back here
        for tensor in tensors:
            torch.ops._c10d_functional.wait_tensor(tensor)  # the only way out of torch's registry
        self._completer.release(self)

    def is_completed(self):
        if not self._over and all(t.done() for t in self._tickets):
            self.settle()
        return self._over

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        return self._error if self.is_completed() else None

    def synchronize(self):
        self.wait()

    def result(self):
        self.wait()
        return self._tensors

    def source_rank(self):
        return self._tickets[0].source

    _source_rank = source_rank

    def get_future(self):
        future = self._new_future()
        self._futures.append(future)  # before the look whether it is over: whoever ends it then sees this one, or we do
        if self._over:
            self._resolve_futures()
        else:
            self._completer.watch(self)
        return _can_fail(future)

    def _new_future(self):
        return torch.futures.Future()

    # --- the end

    def end(self):
        """Waits until it is over; its error is for `wait` to raise."""
        self._await(None)

    def _await(self, seconds):
        """Waits until all is over and settled. An exception that a signal handler raises meanwhile leaves nothing
        behind that would still touch the tensors: what is not over is withdrawn first (transport/base.py)."""
        if self._over:
            return
        self._completer.refuse_inside(self._tickets)
        try:
            late = self._await_tickets(None if seconds is None else time.monotonic() + seconds)
        except BaseException:
            self._withdraw()
            raise
        if late is not None:
            what, waits = late.standing()
            raise CollectiveTimeoutError(
                f"{what}: not done after the {seconds:g} s given to wait(); it goes on until its own time-out. {waits}"
            )
        self.settle()

    def _await_tickets(self, deadline):
        """The first that was not done by then, or None."""
        for ticket in self._tickets:
            while True:
                left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
                if ticket.wait(max(left, 0.0), may_run=deadline is None):
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    return ticket
        return None

    def _withdraw(self):
        for ticket in self._tickets:
            if not ticket.done():
                ticket.withdraw()
        self.settle()

    def settle(self):
        """All tickets are done: run `finish`, drop what was kept, resolve the futures."""
        with self._lock:
            if self._over or self._settling:  # the latter: by an outer frame, below a signal handler
                return
            self._settling = True
            try:
                self._error = next((e for t in self._tickets if (e := t.error())), None)
                if self._error is None and self._finish is not None:
                    self._finish()
            except BaseException as error:  # what a signal handler raises, too: `wait` raises it
                self._error = error
            self._finish = None
            self._over = True
        try:
            self._let_go()
        finally:
            self._resolve_futures()

    def _resolve_futures(self):
        futures, self._futures = self._futures, []  # no signal handler, and no other thread, runs amid this line
        try:
            for future in futures:
                self._resolve(future)
        except BaseException:
            for future in futures:
                if not future.done():
                    self._resolve(future)
            raise

    def _let_go(self):
        self._keep = None
        self._completer.forget(self)

    def _resolve(self, future):
        if self._error is not None:
            future.set_result(_Failure(self._error))
        else:
            future.set_result(self._tensors)


class DeviceWork(Work):
    """Work on tensors of a device. It is settled when the GPU has been told of all of it: then futures resolve,
    and `wait` lets the current stream wait for the rest. ``stream_ops``: what tells of the GPU's side, one for
    each operation. What was kept is so until a stream waits, or the GPU is done."""

    def __init__(self, completer, tickets, tensors, finish, keep, stream_ops):
        super().__init__(completer, tickets, tensors, finish, keep)
        self._stream_ops = stream_ops

    def wait(self, timeout=None):
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        began = time.monotonic()
        super().wait(timeout)
        for stream_op in self._stream_ops:
            stream_op.join()
        if seconds and seconds > 0:
            self._await_gpu(began + seconds, seconds)
        super()._let_go()
        return True

    def is_completed(self):
        if not super().is_completed():
            return False
        if self._error is None and not all(f.completed() for f in self._stream_ops):
            return False
        super()._let_go()
        return True

    def _await_gpu(self, deadline, seconds):
        while not all(f.completed() for f in self._stream_ops):
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError(f"Work.wait: the GPU is not done after the {seconds:g} s given to wait()")
            time.sleep(_GPU_STEP)

    def _let_go(self):
        if self._error is not None:
            super()._let_go()

    def _new_future(self):
        return self._stream_ops[0].future()

    def _resolve(self, future):
        if self._error is not None:
            future.set_result(_Failure(self._error))
        else:
            self._stream_ops[0].resolve(future, self._tensors, self._stream_ops)


class Completer:
    """Ends Works that nobody waits for: those with a future, or with something to do at the end.

    Callbacks of a future run in the thread that completes it and may wait for further operations of
    the same group, so there is always one more thread than there are callbacks running.

    A signal handler may run between any two steps of the main thread, and use the group there. So the lock may be taken
    twice by one thread, is held for a few steps only, and never while a thread starts or ends, or a callback runs."""

    def __init__(self, transport, name):
        self._transport, self._name = transport, name
        self._lock = threading.RLock()
        self._tokens = itertools.count(1)
        self._watched = {}  # token -> (work, index of the ticket it stands for)
        self._in_flight = {}  # an ordered set: keeps Works, and so their tensors, alive until they end
        self._remembered = deque(maxlen=_REMEMBERED)
        self._held = set()  # Works that torch's registry of graph inputs has
        self._idle = 0
        self._threads = set()

    def keep(self, work):
        """Keeps ``work`` alive until it ends."""
        with self._lock:
            # Works that nobody waits for are let go here, a few at each call.
            oldest = list(itertools.islice(self._in_flight, _SWEEP)) if self._in_flight else ()
            for w in oldest:
                self._in_flight.pop(w, None)
                self._in_flight[w] = None
            self._in_flight[work] = None
        for w in oldest:
            if w.is_completed():
                self.forget(w)

    def adopt(self, work, eager):
        """The same of a Work that C++ may have; ``eager``: sees to its end, too."""
        self.keep(work)
        if all(not t.is_sparse and t.nbytes <= _TINY for t in work._tensors):
            self._remembered.append(work)
        if eager:
            self.watch(work)

    def refuse_inside(self, tickets):
        """UsageError if one of them is a collective that waits for this thread's own outer frame."""
        for ticket in tickets:
            if ticket.collective and not ticket.done() and self._transport.interrupted_here():
                raise self._transport.inside("Work.wait of a collective")

    def forget(self, work):
        with self._lock:
            self._in_flight.pop(work, None)

    def hold(self, work):
        """Keeps ``work`` alive until `release`."""
        self._held.add(work)

    def release(self, work):
        self._held.discard(work)

    def watch(self, work, index=0):
        """Settles ``work`` once its tickets, from ``index`` on, are done."""
        while index < len(work._tickets):
            ticket = work._tickets[index]
            token = next(self._tokens)
            with self._lock:
                self._watched[token] = (work, index)
            if not self._threads:
                self._start()
            if ticket.watch(token):
                return
            with self._lock:
                self._watched.pop(token, None)
            index += 1
        work.settle()

    def wait_all(self, seconds):
        """Waits for every Work under way, each for up to ``seconds``."""
        for work in list(self._in_flight):
            work.wait(seconds)

    def close(self):
        """Ends the threads; the transport has left, so nothing keeps them."""
        # One that ends may have started another; and one that is still at the end of a callback when the interpreter
        # goes away takes the process with it.
        until = time.monotonic() + _JOIN
        while (threads := self._others()) and time.monotonic() < until:
            threads[0].join(until - time.monotonic())
        for work in list(self._in_flight):
            work.settle()
        self._remembered.clear()

    def _others(self):
        with self._lock:
            return [t for t in self._threads if t.is_alive() and t is not threading.current_thread()]

    def drop_all(self):
        """The transport is closed: nothing uses what unfinished Works have kept."""
        with self._lock:
            self._in_flight.clear()

    def _start(self):
        with self._lock:
            self._idle += 1
        try:
            thread = start(self._run, f"c10d_custom:{self._name}")
        except RuntimeError as error:
            with self._lock:
                self._idle -= 1
            raise TransportError(f"group {self._name}: no thread for its futures: {error} (ulimit -u)") from error
        with self._lock:
            self._threads = {t for t in self._threads if t.is_alive()} | {thread}

    def _run(self):
        try:
            while True:
                token = self._transport.next_completed(3600.0)
                if token is None:
                    continue
                with self._lock:
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
