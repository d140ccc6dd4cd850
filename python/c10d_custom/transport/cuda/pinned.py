"""Pinned host memory that messages of CUDA tensors pass through where they are staged; kept for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...threads import threading

if TYPE_CHECKING:
    from .driver import Driver


_KEPT = 64 << 20  # bytes kept for messages to come, or as many as two of the largest had: one on its way out, one in


def _size_for(nbytes: int) -> int:
    """So few sizes that what is kept fits again; of large ones, an eighth more at most."""
    if nbytes <= _KEPT:
        return max(4096, 1 << max(0, nbytes - 1).bit_length())
    step = 1 << (nbytes - 1).bit_length() - 4
    return -(-nbytes // step) * step


class Pinned:
    """Pinned host memory, kept for the next one who asks. A signal handler that calls the group may come amid any
    step."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.RLock()
        self._free: dict[int, list[int]] = {}  # bytes -> addresses
        self._kept = self._largest = 0
        self._all: dict[int, int] = {}  # address -> bytes
        self._closed = False

    def take(self, nbytes: int) -> int:
        size = _size_for(nbytes)
        with self._lock:
            self._largest = max(self._largest, size)
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
            if not self._closed and self._kept + size <= max(_KEPT, 2 * self._largest):
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
