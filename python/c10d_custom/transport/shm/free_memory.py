"""How much memory this process can still get: what the machine has, and what its cgroups allow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def left() -> tuple[int, str]:
    """(bytes, whose limit that is). File caches count as free."""
    found = [_machine()]
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                found += _cgroups(_CGROUPS, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                found += _cgroups(
                    _CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )
    return min(found)


def _machine() -> tuple[int, str]:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10, "the machine"
    return 1 << 62, "nobody"


def _cgroups(root: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[tuple[int, str]]:
    """Of the cgroup and of those it is in; inside a container, what is to be seen of them."""
    folder = root / path.lstrip("/")
    for each in (folder, *folder.parents):
        if not each.is_relative_to(root):
            return
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such file; "max"
            stat = dict(line.split() for line in (each / "memory.stat").read_text().splitlines())
            yield (
                int((each / limit).read_text()) - int((each / usage).read_text()) + int(stat[cache]),
                f"the cgroup {each}",
            )
