"""Allocations of other processes that this process has open on one GPU, kept for the next call that uses them.

CUDA opens an exported allocation once in a process: who opens it again gets the same address, also when the exporter
has freed it and another one lies in its place, with an equal handle. So there is one Mappings for all groups of a
process, an allocation is known by its exporter and a number that the exporter never gives twice, and one that lies
where a newer one does is closed before the newer is opened.

What is open keeps memory from being given back that its owner has freed. So owners say what they have freed, no more
than `most` are open, and what no group uses is closed. Nothing is closed while a kernel of a call may use it: between
`enter` and `leave` or, after a call that failed, `release`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import TransportError
from ...threads import threading

HANDLE_BYTES = 64  # of what CUDA exports
_MOST = 64


class Allocation(NamedTuple):
    """Memory as it was allocated: all of it is exported as one. ``number``: no other one of the process ever has it."""

    base: int
    nbytes: int
    number: int


@dataclass
class _Open:
    base: int  # at its owner
    nbytes: int
    address: int  # here
    users: Counter[Hashable] = field(default_factory=Counter)  # group -> its calls between `enter` and `leave`

    def used(self) -> bool:
        return any(self.users.values())


class Mappings:
    """``driver``: the Driver; ``owner``: the exporter's Driver.identity. Any thread, with the driver active."""

    def __init__(self, driver: Any, most: int = _MOST) -> None:
        self._driver, self._most = driver, most
        self._lock = threading.RLock()
        self._open: dict[tuple[int, int], _Open] = {}  # (owner, number of the allocation), used longest ago first

    def enter(self, group: Hashable, owner: int, allocation: Allocation, handle: bytes) -> int:
        """The address here of its first byte. TransportError, or CUDA's error, where it cannot be opened."""
        key = owner, allocation.number
        with self._lock:
            found = self._open.pop(key, None)
            if found is None:
                self._make_room(owner, allocation)
                found = _Open(allocation.base, allocation.nbytes, self._driver.open_memory(handle))
            self._open[key] = found
            found.users[group] += 1
            return found.address

    def leave(self, group: Hashable, owner: int, number: int) -> None:
        """A call of ``group`` for which it was entered is over, on the GPU, too."""
        with self._lock:
            self._open[owner, number].users[group] -= 1

    def forget(self, owner: int, numbers: Iterable[int]) -> None:
        """Their owner has freed them."""
        with self._lock:
            for number in numbers:
                found = self._open.get((owner, number))
                if found is not None and not found.used():
                    self._close((owner, number))

    def release(self, group: Hashable) -> None:
        """The group is over, and its stream is idle."""
        with self._lock:
            for key, found in list(self._open.items()):
                found.users.pop(group, None)
                if not found.users:
                    self._close(key)

    def _make_room(self, owner: int, allocation: Allocation) -> None:
        for key, other in list(self._open.items()):
            end = allocation.base + allocation.nbytes
            if key[0] == owner and other.base < end and allocation.base < other.base + other.nbytes:
                if other.used():
                    raise TransportError("memory of another process that a call may still use has been freed there")
                self._close(key)
        idle = [key for key, other in self._open.items() if not other.used()]
        for key in idle[: max(0, len(self._open) - self._most + 1)]:
            self._close(key)
        if len(self._open) >= self._most:
            raise TransportError(f"{len(self._open)} allocations of other processes are in use, {self._most} at most")

    def _close(self, key: tuple[int, int]) -> None:
        self._driver.close_memory(self._open.pop(key).address)
