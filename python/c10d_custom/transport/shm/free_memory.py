"""How much memory this process can still get: what the machine has, and what its cgroups allow."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

_CGROUPS = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60  # a cgroup's without one is a number near 2^63 (version 1), or "max"


class _Limit:
    """Of a cgroup. ``usage``: its file that says how much is taken; ``cache``: the line of its memory.stat that says
    how much of that are file caches."""

    __slots__ = ("bytes", "folder", "usage", "cache")

    def __init__(self, bytes: int, folder: str, usage: str, cache: str) -> None:
        self.bytes, self.folder, self.usage, self.cache = bytes, folder, usage, cache


def left(enough: int | None = None) -> tuple[int, str]:
    """(bytes, whose limit that is). File caches count as free. To ask for them takes the kernel a while: not where
    there are ``enough`` bytes without, and then the answer is as many at least."""
    found = [_machine(enough)]
    with contextlib.suppress(OSError):
        found += [_left_of(limit, enough) for limit in _limits(_text("/proc/self/cgroup"))]
    return min(found)


def _text(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return file.read().decode()


def _machine(enough: int | None) -> tuple[int, str]:
    with contextlib.suppress(OSError, ValueError):
        if enough is not None and (free := os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >= enough:
            return free, "the machine"
        for line in _text("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10, "the machine"
    return 1 << 62, "nobody"


def _left_of(limit: _Limit, enough: int | None) -> tuple[int, str]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        free = limit.bytes - int(_text(f"{limit.folder}/{limit.usage}"))
        if enough is None or free < enough:
            stat = dict(line.split() for line in _text(f"{limit.folder}/memory.stat").splitlines())
            free += int(stat[limit.cache])
        return free, f"the cgroup {limit.folder}"
    return 1 << 62, "nobody"


@functools.cache  # a process stays where it is, and so do limits, as a rule
def _limits(cgroups: str) -> list[_Limit]:
    """``cgroups``: of a process, as /proc shows them."""
    found: list[_Limit] = []
    with contextlib.suppress(ValueError):
        for line in cgroups.splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                found += _on_the_way(_CGROUPS, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                found += _on_the_way(f"{_CGROUPS}/memory", path, *files)
    return found


def _on_the_way(root: str, path: str, limit: str, usage: str, cache: str) -> Iterator[_Limit]:
    """The limits of the cgroup and of those it is in; inside a container, what is to be seen of them."""
    folder = f"{root}/{path.strip('/')}".rstrip("/")
    while folder.startswith(root):
        with contextlib.suppress(OSError, ValueError):  # no such file; "max"
            if (most := int(_text(f"{folder}/{limit}"))) < _NO_LIMIT:
                yield _Limit(most, folder, usage, cache)
        folder = folder.rpartition("/")[0]
