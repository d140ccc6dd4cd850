"""What makes one rank's stream come after another rank's work (of one rank's own streams: stream_op.py).

Data moves in rounds, numbered from 0 over the life of the group, alike on all ranks. In round k each rank
puts data into half k % 2 of its staging memory; all ranks meet; each takes what it needs from the others'
halves. An order has four steps for it, each with the round's number:

    reuse    the stream waits until the readers of what round k - 2 left in this half are done
             ... work that puts ...
    publish  what was put is there, once the stream has come here
             ... the ranks meet, if `meets` ...
    arrive   the stream waits for what the ranks of `sources` have published in round k
             ... work that takes ...
    release  this rank has read all it wants of round k, once the stream has come here

With `meets` a rank may wait only for what was recorded before a meeting, and record again only what all
have enqueued their waits for. `EventOrder` keeps to it so: a rank arrives in round k after meeting k, and the
event was recorded before it; it reuses in round k what was released in round k - 2, before meeting k - 1. An
event of round k is recorded again in round k + 2; its waits were enqueued before meeting k + 1 (published)
or k + 2 (released: the recorder does so after that meeting).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .driver import Driver


HALVES = 2
_BEYOND = 1 << 30  # further on than any waiter is
_WORD = 256  # bytes from one word of a pad to the next


class EventOrder:
    """Interprocess events. A wait for an event that was never recorded passes, hence the meetings."""

    meets = True
    name = "events"

    def __init__(self, driver: Driver, rank: int, helper: int) -> None:
        self._driver, self._rank = driver, rank
        self._own: list[int] = []
        self._theirs: dict[int, list[int]] = {}

    def prepare(self) -> None:
        for _ in range(2 * HALVES):
            self._own.append(self._driver.create_event(shared=True))

    def handles(self) -> list[str]:
        return [self._driver.export_event(e).hex() for e in self._own]

    def open(self, rank: int, handles: list[str]) -> None:
        opened = self._theirs.setdefault(rank, [])
        for handle in handles:
            opened.append(self._driver.open_event(bytes.fromhex(handle)))

    def trial(self, stream: int) -> None:
        """Enqueues what ends only if the order works."""

    def reuse(self, stream: int, k: int, readers: Iterable[int]) -> None:
        if k >= HALVES:
            for rank in readers:
                if rank != self._rank:
                    self._driver.wait(stream, self._theirs[rank][HALVES + k % HALVES])

    def publish(self, stream: int, k: int) -> None:
        self._driver.record(self._own[k % HALVES], stream)

    def arrive(self, stream: int, k: int, sources: Iterable[int]) -> None:
        for rank in sources:
            if rank != self._rank:
                self._driver.wait(stream, self._theirs[rank][k % HALVES])

    def release(self, stream: int, k: int) -> None:
        self._driver.record(self._own[HALVES + k % HALVES], stream)

    def let_go(self, k: int) -> None:
        """Nothing of the GPU's waits for a rank that is gone: an event counts as past once its process is."""

    def close_imports(self) -> None:
        theirs, self._theirs = self._theirs, {}
        for events in theirs.values():
            for event in events:
                self._driver.destroy_event(event)

    def free(self) -> None:
        own, self._own = self._own, []
        for event in own:
            self._driver.destroy_event(event)


class ValueOrder:
    """Counters in device memory, moved on and awaited by the streams themselves. Each rank writes those of its
    own pad: rounds published, rounds released, and one for the trial. No meetings, but a rank that is gone
    leaves waits behind, which `let_go` must end."""

    meets = False
    name = "values"

    def __init__(self, driver: Driver, rank: int, helper: int) -> None:
        self._driver, self._rank, self._helper = driver, rank, helper
        self._pad: Any = None  # an address, from `prepare` to `free`
        self._theirs: dict[int, int] = {}

    def prepare(self) -> None:
        self._pad = self._driver.allocate(3 * _WORD)
        for word in range(3):
            self._driver.write_value(self._helper, self._pad + word * _WORD, 0)

    def handles(self) -> list[str]:
        return [self._driver.export_memory(self._pad).hex()]

    def open(self, rank: int, handles: list[str]) -> None:
        self._theirs[rank] = self._driver.open_memory(bytes.fromhex(handles[0]))

    def trial(self, stream: int) -> None:
        self._driver.write_value(stream, self._pad + 2 * _WORD, 1)
        for pad in self._theirs.values():
            self._driver.wait_value(stream, pad + 2 * _WORD, 1)

    def reuse(self, stream: int, k: int, readers: Iterable[int]) -> None:
        if k >= HALVES:
            for rank in readers:
                if rank != self._rank:
                    self._driver.wait_value(stream, self._theirs[rank] + _WORD, k - HALVES + 1)

    def publish(self, stream: int, k: int) -> None:
        self._driver.write_value(stream, self._pad, k + 1)

    def arrive(self, stream: int, k: int, sources: Iterable[int]) -> None:
        for rank in sources:
            if rank != self._rank:
                self._driver.wait_value(stream, self._theirs[rank], k + 1)

    def release(self, stream: int, k: int) -> None:
        self._driver.write_value(stream, self._pad + _WORD, k + 1)

    def let_go(self, k: int) -> None:
        """Ends every wait for another rank, the last round being ``k``: only a stream's write does."""
        for pad in self._theirs.values():
            for word in range(3):
                self._driver.write_value(self._helper, pad + word * _WORD, k + _BEYOND)

    def close_imports(self) -> None:
        theirs, self._theirs = self._theirs, {}
        for pad in theirs.values():
            self._driver.close_memory(pad)

    def free(self) -> None:
        pad, self._pad = self._pad, None
        if pad is not None:
            self._driver.free(pad)
