"""The order (order.py) by interprocess events.

A wait for an event that was never recorded passes, hence the meetings. A rank may wait only for what was recorded
before a meeting, and record again only what all have enqueued their waits for. So it is: a rank arrives in round k
after meeting k, and the event was recorded before it; it reuses in round k what was released in round k - 2, before
meeting k - 1. An event of round k is recorded again in round k + 2; its waits were enqueued before meeting k + 1
(published) or k + 2 (released: the recorder does so after that meeting).

Nothing on this side ends a wait for an event: where the other process lives and its stream hangs, this one hangs with
it. Where a process that ends lets its events count as past, they do though what was put before them is not there. So
each rank counts what it has put, in a word of its own for each half, which a reader copies to its host with what it
takes.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ...threads import threading
from .order import HALVES, Order

if TYPE_CHECKING:
    from .driver import Driver

_BYTES = 4


class EventOrder(Order):
    """``_counts``: pinned memory, for each rank how far its own count was when this rank's stream last took from it.
    They only grow, so a later call's may stand for an earlier one's."""

    name = "events"
    on_stream = True

    def __init__(self, driver: Driver, rank: int, size: int, helper: int) -> None:
        super().__init__(driver, rank, size, helper)
        self._own: list[int] = []
        self._theirs: dict[int, list[int]] = {}
        self._count: int | None = None  # an address, from `prepare` to `free`
        self._their_counts: dict[int, int] = {}
        self._counts: int | None = None  # likewise
        self._claimed: dict[int, int] = {}  # rank -> what its count must have been
        self._lock = threading.RLock()  # any thread asks for the counts, at any time

    def prepare(self) -> None:
        for _ in range(2 * HALVES):
            self._own.append(self._driver.create_event(shared=True))
        self._count = self._driver.allocate(HALVES * _BYTES)
        self._driver.zero(self._helper, self._count, HALVES * _BYTES)
        self._counts = self._driver.allocate_pinned(_BYTES * self._size)
        c.memset(self._counts, 0, _BYTES * self._size)

    def handles(self) -> list[str]:
        assert self._count is not None
        return [self._driver.export_memory(self._count).hex(), *(self._driver.export_event(e).hex() for e in self._own)]

    def open(self, rank: int, handles: list[str]) -> None:
        count, *events = (bytes.fromhex(h) for h in handles)
        self._their_counts[rank] = self._driver.open_memory(count)
        opened = self._theirs.setdefault(rank, [])
        for event in events:
            opened.append(self._driver.open_event(event))

    def reuse(self, stream: int, k: int, readers: Iterable[int]) -> None:
        if k >= HALVES:
            for rank in self._others(readers):
                self._driver.wait(stream, self._theirs[rank][HALVES + k % HALVES])

    def publish(self, stream: int, k: int) -> None:
        assert self._count is not None
        self._driver.fill(stream, self._count + _BYTES * (k % HALVES), k + 1)
        self._driver.record(self._own[k % HALVES], stream)

    def arrive(self, stream: int, k: int, sources: Iterable[int]) -> None:
        assert self._counts is not None
        for rank in self._others(sources):
            self._driver.wait(stream, self._theirs[rank][k % HALVES])
            count = self._their_counts[rank] + _BYTES * (k % HALVES)
            self._driver.copy(stream, self._counts + _BYTES * rank, count, _BYTES)
            self._claimed[rank] = k + 1

    def release(self, stream: int, k: int) -> None:
        self._driver.record(self._own[HALVES + k % HALVES], stream)

    def claims(self) -> Callable[[], list[int]]:
        return partial(self._short, dict(self._claimed))

    def _short(self, claimed: dict[int, int]) -> list[int]:
        with self._lock:
            if (counts := self._counts) is None:
                return []  # closed
            there = {r: c.c_uint32.from_address(counts + _BYTES * r).value for r in claimed}
        return [r for r, least in claimed.items() if _behind(there[r], least)]

    def close_imports(self) -> None:
        theirs, self._theirs = self._theirs, {}
        for events in theirs.values():
            for event in events:
                self._driver.destroy_event(event)
        counts, self._their_counts = self._their_counts, {}
        for address in counts.values():
            self._driver.close_memory(address)

    def free(self) -> None:
        own, self._own = self._own, []
        for event in own:
            self._driver.destroy_event(event)
        count, self._count = self._count, None
        if count is not None:
            self._driver.free(count)
        with self._lock:
            counts, self._counts = self._counts, None
        if counts is not None:
            self._driver.free_pinned(counts)


def _behind(count: int, least: int) -> bool:
    """Cyclically, as a stream compares values."""
    return c.c_int32((count - least) & 0xFFFFFFFF).value < 0
