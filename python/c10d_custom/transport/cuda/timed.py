"""Calls of which it is wanted how long they take on the GPU."""

from __future__ import annotations

from .stream_op import StreamOp


class TimedOp(StreamOp):
    """``_times``: events before and after the work of the call, on its stream."""

    _times: tuple[int, ...] = ()

    def begin(self, stream: int) -> None:
        super().begin(stream)
        self._mark(stream)

    def finish(self, stream: int) -> None:
        self._mark(stream)
        super().finish(stream)

    def _mark(self, stream: int) -> None:
        event = self.driver.create_event(timed=True)
        self._times += (event,)
        self.driver.record(event, stream)

    def duration(self) -> float:
        """In milliseconds, of a call that is completed."""
        with self.driver.activate():
            return self.driver.milliseconds(self._times[0], self._times[-1])

    def __del__(self) -> None:
        super().__del__()
        for event in self._times:
            with self.driver.activate():
                self.driver.destroy_event(event)
