"""A call on a device from its issue until the GPU is done with it: which streams wait for which."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import AbortedError
from ...threads import GPU, rest, time

if TYPE_CHECKING:
    import torch

    from .driver import Driver


_LOOK = 20e-3  # s: between two looks whether the group is broken


def poll(done: Callable[[], object], deadline: float, broken: Callable[[], object]) -> bool:
    """Waits until ``done()``: True; False at the deadline, or once ``broken()``."""
    began = looked = time.monotonic()
    while not done():
        now = time.monotonic()
        if now >= deadline:
            return False
        if now - looked >= _LOOK:
            looked = now
            if broken():
                return False
        rest(GPU, now - began)
    return True


def come_to(driver: Driver, stream: int, deadline: float, broken: Callable[[], object]) -> bool:
    """`poll` for all that ``stream`` has by now."""
    event = driver.take_event()
    try:
        driver.record(event, stream)
        return poll(functools.partial(driver.done, event), deadline, broken)
    finally:
        driver.give_event(event)


class StreamOp:
    """``ready``: recorded on the issuer's stream at the issue; ``end``: on the stream that does the work,
    after it. None until enqueued. ``timed``: whether it is wanted how long that takes; ``_times``: then, events before
    and after it."""

    captured = _timed = False
    _times: tuple[int, ...] = ()

    def __init__(self, driver: Driver, timed: bool = False) -> None:
        self.driver, self._timed = driver, timed
        self.began = time.monotonic()
        self.end: int | None = None
        # An error: what it waited for on the GPU did not come, and it went on without.
        self.failed: BaseException | None = None
        # Gives such an error, or None, for calls whose kernels can give up; at any time.
        self.verdict: Callable[[], BaseException | None] | None = None
        self.beside: list[StreamOp] = []  # of a barrier: those of the group's other devices
        self.number = 0  # the group's, of a call that was announced
        self._over = False  # done, and well
        self._issued_on = driver.current_stream()
        self.ready = driver.take_event()
        driver.record(self.ready, self._issued_on)

    def begin(self, stream: int) -> None:
        """``stream`` comes after what was queued at the issue."""
        self.driver.wait(stream, self.ready)
        self._mark(stream)

    def finish(self, stream: int) -> None:
        self._mark(stream)
        end = self.driver.take_event()
        self.driver.record(end, stream)
        self.end = end

    def _mark(self, stream: int) -> None:
        if self._timed:
            self._times += (self.driver.take_event(timed=True),)
            self.driver.record(self._times[-1], stream)

    def duration(self) -> float | None:
        """Of one that is completed, in milliseconds, if that was wanted."""
        if not self._times:
            return None
        with self.driver.activate():
            return self.driver.milliseconds(self._times[0], self._times[-1])

    def completed(self) -> bool:
        """The GPU is done with it. Cannot be told, hence False, while the calling thread captures a graph."""
        if self.end is None or self._over:
            return self._over
        self._check()
        with self.driver.activate():
            if self.driver.capturing() or not self.driver.done(self.end):
                return False
        self._check()  # a kernel that gives up ends like any other
        self._over = True
        return True

    def join(self) -> None:
        """The calling thread's current stream waits for it."""
        if self.end is None:
            raise AbortedError("the call was abandoned before it reached the GPU: the group is of no more use")
        self._check()
        with self.driver.activate():
            self.driver.wait(self.driver.current_stream(), self.end)

    def joined_at_home(self) -> bool:
        """Whether the calling thread's current stream is that of the issue: once joined, what was made for the call
        there may be freed there."""
        return self.driver.current_stream() == self._issued_on

    def _check(self) -> None:
        if self._over:
            return
        if self.failed is None and self.verdict is not None:
            self.failed = self.verdict()
        if self.failed is not None:
            raise type(self.failed)(*self.failed.args)

    def future(self, stream_ops: Sequence[Any]) -> torch.futures.Future[Any]:
        return self.driver.future(list(dict.fromkeys(f.driver.device for f in stream_ops)))

    def resolve(self, future: torch.futures.Future[Any], value: Any, stream_ops: Sequence[Any]) -> None:
        ends = [f.end for f in stream_ops if not f.captured]
        with contextlib.ExitStack() as stack:
            for driver in dict.fromkeys(f.driver for f in stream_ops):
                stack.enter_context(driver.activate())
                stack.enter_context(driver.after(ends))
            future.set_result(value)

    def __del__(self) -> None:
        for event in (getattr(self, "ready", None), getattr(self, "end", None)):
            if event is not None:
                self.driver.give_event(event)
        for event in self._times:
            self.driver.give_event(event, timed=True)


class Captured(StreamOp):
    """A call that a CUDA graph holds: it has its place on the captured stream, and runs whenever the graph does."""

    captured = True

    def __init__(self, driver: Driver) -> None:  # without events
        self.driver = driver

    def completed(self) -> bool:
        return True

    def join(self) -> None:
        pass

    def joined_at_home(self) -> bool:
        return True

    def resolve(self, future: torch.futures.Future[Any], value: Any, stream_ops: Sequence[Any]) -> None:
        future.set_result(value)
