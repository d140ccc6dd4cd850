"""CUDA tensors of one group on one GPU, on a stream of the group's own.

A call is issued in the caller's thread (`issue`: an event marks what its stream had queued) and carried out
in the order of the group's collectives (`execute`), which enqueues it on the group's own stream. What the GPU
has not done yet when `execute` returns, streams and futures wait for, not the host.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...call import Call
from ...errors import CustomBackendError, PeerLostError, TransportError, UsageError
from ...threads import threading
from .. import CLOSED
from .algorithm import Way, choose, host_limit
from .host_exchange import Place, together
from .peers import Mode, Setup
from .shared import SharedCollectives
from .staged import StagedCollectives
from .staged_messages import StagedMessages
from .stream_op import Captured, StreamOp, come_to, poll

if TYPE_CHECKING:
    import torch

    from ...call import Message
    from .. import LocalTransport, Ticket, Transport
    from .driver import Driver
    from .fused import Fused
    from .peers import Peers


log = logging.getLogger("c10d_custom")

_DRAIN = 5.0  # seconds that closing waits for the GPU, and for ranks that still hold our memory
_LOOK = 20e-3
_ABANDONED: list[Call | Peers] = []  # whose tensors a GPU may use until the process ends, this rank's or another's


class CudaTransport:
    """Of ``group``, a ByDevice."""

    def __init__(self, group: Any, driver: Driver) -> None:
        self.cpu, self.driver, self._config, self._one_host = group.cpu, driver, group.config, group.one_host
        self._group = weakref.proxy(group)
        self.mode: Mode | None = None
        self._collectives: Any = None  # once set up: StagedCollectives or SharedCollectives
        self._opened: list[Peers] = []
        self._used_streams: list[int] = []
        self._failed: list[Call] = []  # calls whose tensors the GPU may still use
        self._lock = threading.RLock()
        with driver.activate():
            self.stream = self._create_stream()
        self._place = Place(self.cpu, driver, self._config, self.stream)
        self._messages: StagedMessages | None = None
        self._fused: Fused | None = None

    def _create_stream(self) -> int:
        stream = self.driver.create_stream(self._group.first)
        self._used_streams.append(stream)
        return stream

    def issue(self, call: Call | Message) -> None:
        """Marks what came before ``call`` on the current stream. In the caller's thread."""
        with self.driver.activate():
            if self.driver.capturing():
                self._capture(call)
            else:
                call.stream_op = StreamOp(self.driver, self._group.timed)

    def _capture(self, call: Call | Message) -> None:
        """Launches it into the graph that the current stream is captured into."""
        fused = self._fused
        facts: Any = self._collectives.peers.facts if fused is not None else None
        if not isinstance(call, Call) or fused is None or choose(call, facts, self._config) is not Way.FUSED:
            mode = self.mode.name if self.mode else "not yet chosen"
            raise UsageError(
                f"{call.name}: cannot be captured into a CUDA graph in this mode ({mode}): it takes "
                "the CPU's part, in which the ranks meet. Call it outside the capture. (What can be captured, in p2p "
                "mode and after a call outside: all_reduce, broadcast, all_gather and reduce_scatter of equal parts.)"
            )
        if not fused.p2p.prepared(call):
            raise UsageError(
                f"{call.name}: cannot be captured into a CUDA graph yet: its kernel is not compiled. "
                "Call it once outside the capture, with the same dtype, reduce op and size."
            )
        fused.check(call)
        if self.cpu.broken():
            raise PeerLostError(
                f"{self._place.where(call)}: the group is of no more use (a rank is gone, or a call has failed)."
            )
        stream = self.driver.current_stream()
        fused.captured()
        fused.p2p.run(stream, call)
        if call.copy_back:
            self.driver.copy_tensors(stream, call.copy_back)
        call.stream_op = Captured(self.driver)

    def registered(self, group: Transport, nbytes: int, seconds: float) -> torch.Tensor | None:
        """`Registered.make`, or None where no kernels read tensors where they lie. After a first collective. ``group``:
        takes collectives in their order."""
        if self._fused is None:
            return None
        with self.driver.activate():
            all_ranks = functools.partial(together, group, "empty", lambda: seconds)
            return self._fused.registered.make(nbytes, all_ranks)

    # --- collectives

    def execute(self, call: Call) -> None:
        """Enqueues the collective. Raises its error."""
        stream_op: Any = call.stream_op
        stream_op.began = time.monotonic()  # its turn
        deadline = stream_op.began + call.timeout

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        with self.driver.activate():
            failed_before = bool(self._failed)
            self._failed.append(call)
            try:
                if failed_before:
                    # Raises, as the group is over. Else this rank might put data where another still
                    # reads: that none does was to be known by the meeting that failed.
                    self.cpu.agree(call, left())
                if self._collectives is None:
                    self._set_up(call, left)
                if self._fused is not None:
                    self._fused.check(call)
                stream_op.begin(self.stream)
                self._collectives.run(call, left)
                if call.copy_back:
                    self.driver.copy_tensors(self.stream, call.copy_back)
                if self._fused is not None:
                    self._fused.watch(call)
                stream_op.finish(self.stream)
                self._failed.pop()
            except BaseException as error:
                self.let_go()
                if isinstance(error, CustomBackendError) or not isinstance(error, Exception):  # of a signal handler
                    raise
                self.cpu.abort()  # the others must not wait for what will not come
                raise TransportError(f"{self._place.where(call)}: {type(error).__name__}: {error}") from error

    def settle(self, call: Call, stream_op: StreamOp, deadline: float) -> None:
        """Waits until the GPU has done what was queued before ``call``, a barrier, where ``stream_op`` marks it."""
        stream_op.began = time.monotonic()
        left = deadline - stream_op.began
        with self.driver.activate():
            stream_op.begin(self.stream)
            stream_op.finish(self.stream)
            self._place.came(call, cast("int", stream_op.end), left, "what was queued before the barrier")
            if self._fused is not None:
                self._fused.check(call)

    def _set_up(self, call: Call, left: Callable[[], float]) -> None:
        """Collective over the group: all ranks know already that they call alike."""
        peers: Peers | None = None
        small = ""
        if self._one_host:
            self.cpu.agree(call, left())
            setup = Setup(self._place, call, left, self._group.gpus()[: call.ordinal])
            self._opened = setup.opened
            self.mode, peers = setup.run()
        else:
            self.mode = Mode("staged", "the ranks run on several hosts")
        staged = StagedCollectives(self._place)
        if peers is None:
            self._collectives = staged
        else:
            self._collectives = SharedCollectives(self._place, peers, staged)
            if limit := host_limit(peers.facts, self._config):
                small = f"; up to {limit} bytes through host memory"
            self._fused = peers.fused
            if self._fused is not None:
                self._fused.guard()
        # Alike on all ranks: one says it.
        level = logging.WARNING if self.mode.slower and self.cpu.rank == 0 else logging.INFO
        said = f"CUDA tensors in {self.mode.name} mode: {self.mode.reason}{small}"
        log.log(level, "group %s, rank %d: %s", self.cpu.name or "(unnamed)", self.cpu.rank, said)

    def let_go(self) -> None:
        """After a failure: no kernel of this rank may wait for another for ever."""
        for peers in self._opened:
            peers.let_go()

    # --- messages

    def post(self, message: Message) -> Ticket:
        with self._lock:
            if self._messages is None:
                with self.driver.activate():
                    streams = self._create_stream(), self._create_stream()
                self._messages = StagedMessages(self._place, streams, self._one_host)
        return self._messages.post(message)

    # --- the end

    def prepare_to_leave(self) -> None:
        """The CPU transport is about to leave; to the guard that would look like a failure. Other ranks may not have
        come yet to calls that this one has made."""
        if self._messages is not None:
            self._messages.prepare_to_leave(_DRAIN)
        if (fused := self._fused) is not None:
            if fused.p2p.busy() and not fused.replays:
                with self.driver.activate():
                    come_to(self.driver, self.stream, time.monotonic() + fused.longest, self.cpu.broken)
            fused.close()

    def leave(self) -> None:
        """The CPU transport has left, and no collective is under way."""
        if self._messages is not None:
            self._messages.leave()

    def close_imports(self) -> bool:
        """Whether this rank holds no memory of the others any more. False: the GPU hangs, and what it may still use
        stays until the process ends."""
        with self.driver.activate():
            idle = self.idle(_DRAIN)
            until = time.monotonic() + _DRAIN
            while not idle and time.monotonic() < until:
                self.let_go()
                idle = self.idle(_LOOK)
            if self._messages is not None:
                self._messages.close(idle)
            if idle:
                for peers in self._opened:
                    peers.close_imports()
                return True
        _ABANDONED.extend([*self._failed, *self._opened])
        log.warning("%s is still busy with this group's work; its memory is kept", self.where())
        return False

    def holders(self) -> set[int]:
        """The other ranks that may hold memory of this one."""
        found = set(range(self.cpu.size)) if any(peers.staging for peers in self._opened) else set()
        return found | (self._messages.pieces.holders if self._messages is not None else set())

    def free(self, unused: bool) -> bool:
        """``unused``: whether no other rank holds any memory of this one's any more."""
        with self.driver.activate():
            if unused:
                for peers in self._opened:
                    peers.free()
            else:
                _ABANDONED.extend([*self._failed, *self._opened])
            if self._collectives is not None:
                self._collectives.close()
            if self._messages is not None:
                self._messages.free(unused)
            self._failed = []
            for stream in self._used_streams:
                self.driver.destroy_stream(stream)
            self._used_streams = []
        return True

    def where(self) -> str:
        return f"group {self.cpu.name}, rank {self.cpu.rank}: {self.driver.device}"

    def idle(self, seconds: float) -> bool:
        """Whether the GPU is done with all of this group's work within so many seconds. Where graphs may hold calls of
        the group, their replays that have begun, and all on the calling thread's current stream, count as that, too."""
        until = time.monotonic() + seconds
        replayed = self._fused if self._fused is not None and self._fused.replays else None
        streams = [*self._used_streams, *([self.driver.current_stream()] if replayed is not None else [])]
        if not all(come_to(self.driver, stream, until, lambda: False) for stream in streams):
            return False
        return replayed is None or poll(lambda: not replayed.runs(self.stream, until), until, lambda: False)


def close_all(cpu: Transport, devices: Sequence[CudaTransport], one_host: bool) -> None:
    """The end of all of a rank's CudaTransports of one group. Each rank closes what the others gave, on every GPU, says
    so, and frees its own once all who may hold it have said it or are gone; where some have not in time, its memory
    stays until its process ends, for they may use it."""
    rest = [d for d in devices if _in_good_order(d, d.close_imports)]
    here = cast("LocalTransport", cpu)  # if anything was exported
    if one_host and len(rest) == len(devices):
        here.holds_nothing()
    holders = set().union(*(d.holders() for d in devices))

    def holding() -> list[int]:
        return [rank for rank in here.unmarked(CLOSED) if rank in holders]

    unused = not holders or poll(lambda: not holding(), time.monotonic() + _DRAIN, lambda: False)
    if not unused:
        kept = f"ranks {holding()} have not destroyed the group yet; memory that they may use is kept"
        log.warning("group %s, rank %d: %s", cpu.name, cpu.rank, kept)
    for device in rest:
        _in_good_order(device, functools.partial(device.free, unused or not device.holders()))


def _in_good_order(device: CudaTransport, step: Callable[[], bool]) -> bool:
    try:
        return step()
    except Exception as error:
        # CUDA fails for good once a kernel has: the process's end frees what this did not.
        log.warning("%s could not be left in good order: %s", device.where(), error)
        return False
