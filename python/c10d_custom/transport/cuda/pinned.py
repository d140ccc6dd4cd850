"""Pinned host memory that small messages of CUDA tensors pass through; kept for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...threads import threading

if TYPE_CHECKING:
    from .driver import Driver


_KEPT = 64 << 20  # bytes kept for messages to come


class Pinned:
    """Pinned host memory, kept for the next one who asks. A signal handler that calls the group may come amid any
    step."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.RLock()
        self._free: dict[int, list[int]] = {}  # bytes -> addresses
        self._kept = 0
        self._all: dict[int, int] = {}  # address -> bytes
        self._closed = False

    def take(self, nbytes: int) -> int:
        size = max(4096, 1 << max(0, nbytes - 1).bit_length())  # few sizes: what is kept fits again
        with self._lock:
            if kept := self._free.get(size):
                address = kept.pop()
                self._kept -= size
                return address
        with self._driver.activate():
            address = self._driver.allocate_pinned(size)
        with self._lock:
            self._all[address] = size
        return address

    def give(self, address: int) -> None:
        """No copy from or to it is under way."""
        with self._lock:
            size = self._all[address]
            if not self._closed and self._kept + size <= _KEPT:
                self._kept += size
                self._free.setdefault(size, []).append(address)
                return
            del self._all[address]
        with self._driver.activate():
            self._driver.free_pinned(address)

    def close(self) -> None:
        """Frees what is not lent."""
        with self._lock:
            self._closed = True
            addresses = [a for free in self._free.values() for a in free]
            self._free = {}
            for address in addresses:
                del self._all[address]
        with self._driver.activate():
            for address in addresses:
                self._driver.free_pinned(address)
