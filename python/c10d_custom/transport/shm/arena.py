"""Blocks of a rank's arena (backend/shm/arena.h) as buffers, which own them."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from ctypes import byref, c_char, c_int, c_void_p
from typing import Any

from ...errors import AbortedError, TransportError
from ...native import FORKED, lib, memory_left


@functools.lru_cache(256)  # a type, which takes longer to make than all else here
def _chars(count: int) -> Any:
    return c_char * count


class _Block:
    __slots__ = ("_arena", "_at")

    def __init__(self, arena: int, at: int) -> None:
        self._arena, self._at = arena, at

    def __del__(self, give_back: Callable[..., None] = lib.c10d_give_back) -> None:
        give_back(self._arena, self._at)


def take(handle: int, bytes: int, name: str, interrupted: Callable[[], BaseException]) -> Any:
    """As LocalTransport.take; ``name``: the group's; ``interrupted``: what a signal handler has raised meanwhile."""
    arena, error = c_void_p(), c_int()
    at = lib.c10d_take(handle, bytes, True, byref(arena), byref(error))
    if not at and error.value == errno.ENODATA:
        at = lib.c10d_take(handle, bytes, False, byref(arena), byref(error))
    if not at and error.value == errno.ENOTSUP:
        return None
    if not at and error.value == errno.ECANCELED:
        raise interrupted()
    if not at and error.value < 0:
        what = "this process is a fork of the one that has it" if error.value == -FORKED else "it is destroyed"
        raise AbortedError(f"group {name}: no memory for a tensor: {what}")
    if not at:
        why = f"fallocate: {os.strerror(error.value)}"
        if error.value == errno.ENOMEM:
            free, whose = memory_left()
            why = f"{whose} has {free >> 10} KiB left"
        raise TransportError(f"group {name}: no memory for a tensor of {bytes >> 10} KiB: {why}")
    buffer: Any = _chars(bytes).from_address(at)
    buffer.block = _Block(arena.value or 0, at)
    return buffer
