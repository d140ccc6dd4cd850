"""CUDA tensors of one group on one GPU.

A call is issued in the caller's thread (`issue`: an event marks what its stream had queued) and carried out
in the order of the group's collectives (`execute`), which enqueues it on the group's own stream. What the GPU
has not done yet when `execute` returns, streams and futures wait for, not the host.
"""
import contextlib
import logging
import threading
import time

from ...call import Op
from ...errors import CustomBackendError, PeerLostError, TransportError, UsageError
from .flight import Events, Flight, poll
from .peers import Mode, Setup, close_all
from .shared import SharedCollectives
from .staged import Pinned, StagedCollectives, StagedMessages, timed_out

log = logging.getLogger("c10d_custom")

_DRAIN = 5.0          # seconds that closing waits for the GPU, and for ranks that still hold our memory
_GUARD = 20e-3


class CudaTransport:
    """``cpu``: the group's transport of CPU tensors; ``one_host``: whether its ranks share one."""

    def __init__(self, cpu, driver, config, one_host):
        self.cpu, self.driver, self._config, self._one_host = cpu, driver, config, one_host
        self.mode = None
        self._collectives = None
        self._opened = []
        self._used_streams = []
        self._failed = []   # calls whose tensors the GPU may still use
        self._lock = threading.Lock()
        with driver.activate():
            self._events = Events(driver)
            self.stream = self._create_stream()
            self._pinned = Pinned(driver)
        self._messages = None
        self._guard = None

    def _create_stream(self):
        stream = self.driver.create_stream()
        self._used_streams.append(stream)
        return stream

    def issue(self, call):
        """Marks what came before ``call`` on the current stream. In the caller's thread."""
        with self.driver.activate():
            if self.driver.capturing():
                mode = self.mode.name if self.mode else "not yet chosen"
                raise UsageError(f"{call.name}: cannot be captured into a CUDA graph in this mode ({mode}): it takes "
                                 "the CPU's part, in which the ranks meet. Call it outside the capture.")
            call.flight = Flight(self.driver, self._events)

    # --- collectives

    def execute(self, call):
        """Enqueues the collective. Raises its error."""
        flight = call.flight
        deadline = flight.began + call.timeout

        def left():
            return max(0.0, deadline - time.monotonic())

        with self.driver.activate():
            if call.op is Op.barrier:
                return self._barrier(call, deadline, left)
            self._failed.append(call)
            try:
                if self._collectives is None:
                    self._set_up(call, left)
                flight.begin(self.stream)
                self._collectives.run(call, left)
                if call.copy_back:
                    self.driver.copy_tensors(self.stream, call.copy_back)
                flight.finish(self.stream)
                if self._guard is not None:
                    self._guard.watch(flight, deadline)
                self._failed.pop()
            except CustomBackendError:
                self._let_go()
                raise
            except Exception as error:
                self._let_go()
                self.cpu.abort()  # the others must not wait for what will not come
                raise TransportError(f"{self._where(call)}: {type(error).__name__}: {error}") from error
            except BaseException:  # of a signal handler
                self._let_go()
                raise

    def _barrier(self, call, deadline, left):
        """What the ranks had queued before it, they have done."""
        flight = call.flight
        flight.begin(self.stream)
        flight.finish(self.stream)
        if not poll(lambda: self.driver.done(flight.end), deadline, self.cpu.broken) and not self.cpu.broken():
            raise self._late(call, "what was queued before the barrier")
        self.cpu.run(call)

    def _set_up(self, call, left):
        """Collective over the group: all ranks know already that they call alike."""
        setup, peers = None, None
        if self._one_host:
            self.cpu.agree(call, left())
            setup = Setup(self.cpu, self.driver, self._config, self.stream, self._create_stream(), call, left)
            self._opened = setup.opened
            self.mode, peers = setup.run()
        else:
            self.mode = Mode("staged", "the ranks run on several hosts")
        if peers is None:
            self._collectives = StagedCollectives(self.cpu, self.driver, self._config, self.stream, self._late)
        else:
            self._collectives = SharedCollectives(self.cpu, self.driver, peers, self._config, self.stream)
            if peers.order is not None and not peers.order.meets:
                self._guard = _Guard(self)
        order = f", ordered by {peers.order.name}" if peers is not None and peers.order is not None else ""
        log.info("group %s, rank %d: CUDA tensors in %s mode%s: %s", self.cpu.name or "(unnamed)", self.cpu.rank,
                 self.mode.name, order, self.mode.reason)

    def _where(self, call):
        return f"{call.name} of group {self.cpu.name or '(unnamed)'}, rank {self.cpu.rank}"

    def _late(self, call, what):
        """The error for a GPU that takes too long; the group is over."""
        if self.cpu.broken():
            return PeerLostError(f"{self._where(call)}: the group is of no more use (a rank is gone, or a call has "
                                 f"failed), and {self.driver.device} has not finished {what}.")
        self.cpu.abort()
        return timed_out(self._where(call), call, self.driver.device, what)

    def _let_go(self):
        """After a failure: no stream of this rank may wait for another for ever."""
        with contextlib.suppress(Exception):  # a GPU that has failed fails here, too; the first error counts
            if self._collectives is not None:
                self._collectives.let_go()
            else:
                for peers in self._opened:
                    peers.let_go(0)

    # --- messages

    def post(self, message):
        with self._lock:
            if self._messages is None:
                with self.driver.activate():
                    streams = self._create_stream(), self._create_stream()
                self._messages = StagedMessages(self.cpu, self.driver, self._pinned, streams, self.cpu.complete,
                                                self._late)
        return self._messages.post(message)

    # --- the end

    def leave(self):
        """The CPU transport has left, and no collective is under way."""
        if self._messages is not None:
            self._messages.leave()

    def close(self):
        """Frees everything, unless the GPU hangs: then what it may still use stays until the process ends."""
        with self.driver.activate():
            if self._guard is not None:
                self._guard.close()
            idle = self._idle(_DRAIN)
            if not idle:
                self._let_go()
                idle = self._idle(_DRAIN)
            if self._messages is not None:
                self._messages.close()
            if not idle:
                log.warning("group %s, rank %d: %s is still busy with this group's work; its memory is kept",
                            self.cpu.name, self.cpu.rank, self.driver.device)
                return
            if not close_all(self.cpu, self._opened, _DRAIN):
                log.warning("group %s, rank %d: ranks %s have not destroyed the group yet; memory that they may use "
                            "is kept", self.cpu.name, self.cpu.rank, self.cpu.unmarked(1))
            if isinstance(self._collectives, StagedCollectives):
                self._collectives.close()
            self._pinned.close()
            self._failed = []
            self._events.close()

    def _idle(self, seconds):
        until = time.monotonic() + seconds
        events = [self.driver.create_event() for _ in self._used_streams]
        for event, stream in zip(events, self._used_streams):
            self.driver.record(event, stream)
        idle = all([poll(lambda e=e: self.driver.done(e), until, lambda: False) for e in events])
        for event in events:
            self.driver.destroy_event(event)
        return idle


class _Guard:
    """For streams that wait for other ranks by themselves: ends their waits when a rank is gone or a call's
    time is over."""

    def __init__(self, transport):
        self._t = transport
        self._flights = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="c10d_custom:guard", daemon=True)
        self._thread.start()

    def watch(self, flight, deadline):
        with self._lock:
            self._flights.append((flight, deadline))
        self._wake.set()

    def _run(self):
        t = self._t
        while not self._over:
            if not self._flights:
                self._wake.wait(1.0)
                self._wake.clear()
                continue
            with self._lock:
                self._flights = [(f, d) for f, d in self._flights if not f.completed()]
                late = any(time.monotonic() >= d for _, d in self._flights)
            if self._flights and (late or t.cpu.broken()):
                # Before their waits end: who looks at them afterwards must find it.
                for flight, _ in self._flights:
                    flight.failed = True
                with t.driver.activate():
                    t._let_go()
                if late:
                    t.cpu.abort()
                return
            time.sleep(_GUARD)

    def close(self):
        self._over = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._flights = []
