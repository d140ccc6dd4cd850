"""What makes one rank's work come after another rank's (that of one rank's own streams: stream_op.py).

Data moves in rounds, numbered from 0 over the life of the group, alike on all ranks. In round k each rank
puts data into half k % 2 of its staging memory; all ranks meet; each takes what it needs from the others'
halves. An order has five steps for it, all but one with the round's number:

    reuse    the stream waits until the readers of what round k - 2 left in this half are done
             ... work that puts ...
    publish  what was put is there, once the stream has come here
    reached  whether this rank may go to the meeting; its host waits until it may
             ... the ranks meet, if `meets` ...
    arrive   the stream waits for what the ranks of `sources` have published in round k
             ... work that takes ...
    release  this rank has read all it wants of round k, once the stream has come here

A stream that waits for another process is held by what CUDA makes of that process's end, and by whatever holds that
process's streams. `on_stream` orders let streams wait so, and say how such a wait ends otherwise: `let_go`. Which one
a group takes: decisions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .driver import Driver


HALVES = 2
_BEYOND = 1 << 30  # further on than any waiter is
_WORD = 256  # bytes from one word of a pad to the next


class Order:
    """``helper``: a stream of this rank on which nothing ever waits. Steps of which an order makes nothing are not
    overridden."""

    name: str
    meets = True
    on_stream = False

    def __init__(self, driver: Driver, rank: int, size: int, helper: int) -> None:
        self._driver, self._rank, self._size, self._helper = driver, rank, size, helper

    def prepare(self) -> None:
        """Makes what is this rank's own. Once the helper has come here, the others may open it."""

    def handles(self) -> list[str]:
        """What the others open it by."""
        return []

    def open(self, rank: int, handles: list[str]) -> None:
        pass

    def trial(self, stream: int) -> None:
        """Enqueues what ends only if the order works."""

    def reuse(self, stream: int, k: int, readers: Iterable[int]) -> None:
        pass

    def publish(self, stream: int, k: int) -> None:
        pass

    def reached(self) -> bool:
        return True

    def arrive(self, stream: int, k: int, sources: Iterable[int]) -> None:
        pass

    def release(self, stream: int, k: int) -> None:
        pass

    def claims(self) -> Callable[[], list[int]] | None:
        """For a call that is enqueued: tells, once the GPU is done with it, of which ranks it has taken what they had
        not put. None: that cannot be."""
        return None

    def let_go(self, k: int) -> None:
        """Ends every wait of this rank's streams for another rank, the last round being ``k``. Where others may still
        write, one call may not do: until the streams are idle."""

    def close_imports(self) -> None:
        pass

    def free(self) -> None:
        pass

    def _others(self, ranks: Iterable[int]) -> list[int]:
        return [r for r in ranks if r != self._rank]


class HostOrder(Order):
    """The hosts wait, and no stream does for another rank: nothing that becomes of another process can hold one. A rank
    comes to a meeting once its stream has come to what it published, so after it every stream may take. What was taken
    in round k was so before the rank published in round k + 1: after that meeting the half is free."""

    name = "host"

    def __init__(self, driver: Driver, rank: int, size: int, helper: int) -> None:
        super().__init__(driver, rank, size, helper)
        self._published: int | None = None  # an event, from `prepare` to `free`
        self._awaited = False

    def prepare(self) -> None:
        self._published = self._driver.create_event()

    def publish(self, stream: int, k: int) -> None:
        assert self._published is not None
        self._driver.record(self._published, stream)
        self._awaited = True

    def reached(self) -> bool:
        assert self._published is not None
        if self._awaited and self._driver.done(self._published):
            self._awaited = False
        return not self._awaited

    def free(self) -> None:
        event, self._published = self._published, None
        if event is not None:
            self._driver.destroy_event(event)


class ValueOrder(Order):
    """Counters in device memory, moved on and awaited by the streams themselves. Each rank has a pad with three words
    for every rank, in which that one counts what it has published, what it has released, and its trial: a rank waits on
    its own memory only, and a write of its own stream ends the wait whatever became of the other process. A rank that
    is late may yet write less over it. No meetings."""

    name = "values"
    meets = False
    on_stream = True
    _PUBLISHED, _RELEASED, _TRIED, _WORDS = range(4)

    def __init__(self, driver: Driver, rank: int, size: int, helper: int) -> None:
        super().__init__(driver, rank, size, helper)
        self._pad: int | None = None  # an address, from `prepare` to `free`
        self._theirs: dict[int, int] = {}

    def _at(self, pad: int, word: int, rank: int) -> int:
        return pad + (word * self._size + rank) * _WORD

    def prepare(self) -> None:
        self._pad = self._driver.allocate(self._WORDS * self._size * _WORD)
        self._write_own(0, range(self._size))

    def _write_own(self, value: int, ranks: Iterable[int]) -> None:
        assert self._pad is not None
        for rank in ranks:
            for word in range(self._WORDS):
                self._driver.write_value(self._helper, self._at(self._pad, word, rank), value)

    def _tell(self, stream: int, word: int, value: int) -> None:
        for pad in self._theirs.values():
            self._driver.write_value(stream, self._at(pad, word, self._rank), value)

    def _await(self, stream: int, word: int, ranks: Iterable[int], value: int) -> None:
        assert self._pad is not None
        for rank in self._others(ranks):
            self._driver.wait_value(stream, self._at(self._pad, word, rank), value)

    def handles(self) -> list[str]:
        assert self._pad is not None
        return [self._driver.export_memory(self._pad).hex()]

    def open(self, rank: int, handles: list[str]) -> None:
        self._theirs[rank] = self._driver.open_memory(bytes.fromhex(handles[0]))

    def trial(self, stream: int) -> None:
        """The ranks' values end waits, and so does what `let_go` does: the word for this rank itself is its own."""
        assert self._pad is not None
        self._tell(stream, self._TRIED, 1)
        self._await(stream, self._TRIED, range(self._size), 1)
        own = self._at(self._pad, self._TRIED, self._rank)
        self._driver.wait_value(stream, own, 1)
        self._driver.write_value(self._helper, own, 1)

    def reuse(self, stream: int, k: int, readers: Iterable[int]) -> None:
        if k >= HALVES:
            self._await(stream, self._RELEASED, readers, k - HALVES + 1)

    def publish(self, stream: int, k: int) -> None:
        self._tell(stream, self._PUBLISHED, k + 1)

    def arrive(self, stream: int, k: int, sources: Iterable[int]) -> None:
        self._await(stream, self._PUBLISHED, sources, k + 1)

    def release(self, stream: int, k: int) -> None:
        self._tell(stream, self._RELEASED, k + 1)

    def let_go(self, k: int) -> None:
        if self._pad is not None:
            self._write_own(k + _BEYOND, range(self._size))

    def close_imports(self) -> None:
        theirs, self._theirs = self._theirs, {}
        for pad in theirs.values():
            self._driver.close_memory(pad)

    def free(self) -> None:
        pad, self._pad = self._pad, None
        if pad is not None:
            self._driver.free(pad)
