"""How much memory this process can still get, less some that stays with the program: what the machine has, and what
its cgroups allow (backend/shm/room.h)."""

from __future__ import annotations

from ctypes import create_string_buffer

from . import lib

_ALL = (1 << 64) - 1


def left(enough: int | None = None) -> tuple[int, str]:
    """(bytes, whose limit that is). File caches count as free. To ask for them takes the kernel a while: not where
    there are ``enough`` bytes without, and then the answer is as many at least."""
    whose = create_string_buffer(4096)
    free = lib.c10d_memory_left(_ALL if enough is None else enough, whose, len(whose))
    return free, whose.value.decode(errors="replace")
