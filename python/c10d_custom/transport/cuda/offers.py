"""GPU memory that a rank offers to others, and what it takes to see that they read it there."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import TransportError
from ...threads import time
from .mappings import HANDLE_BYTES
from .stream_op import come_to

if TYPE_CHECKING:
    from .driver import Driver


def offer(driver: Driver, nbytes: int, seconds: float, broken: Callable[[], object]) -> tuple[int, bytes]:
    """Memory for others to open: its address here and its handle, which it begins with: by that they know it."""
    address = driver.allocate(nbytes)
    try:
        handle = driver.export_memory(address)
        _front(driver, address, handle, seconds, broken)
    except BaseException:
        driver.free(address)
        raise
    return address, handle


def open_offered(driver: Driver, handle: bytes, seconds: float, broken: Callable[[], object]) -> int:
    """The address here of memory that another process offers."""
    address = driver.open_memory(handle)
    try:
        if _front(driver, address, b"", seconds, broken) != handle:
            raise TransportError("what another rank has written in its GPU memory is not read here")
    except BaseException:
        driver.close_memory(address)
        raise
    return address


def _front(driver: Driver, address: int, data: bytes, seconds: float, broken: Callable[[], object]) -> bytes:
    """What lies there, once ``data`` does. Not on a stream that may be behind others' work."""
    pinned, stream = driver.allocate_pinned(HANDLE_BYTES), driver.create_stream()
    c.memmove(pinned, data, len(data))
    driver.copy(stream, *((address, pinned) if data else (pinned, address)), HANDLE_BYTES)
    if not come_to(driver, stream, time.monotonic() + seconds, broken):
        raise TransportError(f"a copy of {HANDLE_BYTES} bytes took longer than {seconds:g} s")
    found = c.string_at(pinned, HANDLE_BYTES)
    driver.destroy_stream(stream)
    driver.free_pinned(pinned)
    return found
