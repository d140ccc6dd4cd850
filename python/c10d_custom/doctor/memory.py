"""What a group's shared memory takes, and what there is; limits on the process."""

from __future__ import annotations

import resource
from typing import Any

from ..config import Config
from .finding import Finding, State

_FEW_FILES = 256
_UNLIMITED = resource.RLIM_INFINITY


def _size(count: int) -> str:
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


def memory() -> Finding:
    """What is left, and what groups of 2 and of 8 ranks take of it for their collectives."""
    from .. import native
    from ..transport.shm.segment import at_once, geometry

    try:
        config = Config.from_env()
    except ValueError:
        config = Config()  # settings.py tells
    free, whose = native.memory_left()
    takes = {ranks: at_once(geometry(config, ranks, 0)) for ranks in (2, 8)}
    known = free < 1 << 61
    facts: dict[str, Any] = {
        "free_bytes": max(free, 0) if known else None,
        "limited_by": whose,
        "takes_at_once": {str(ranks): count for ranks, count in takes.items()},
    }
    left = f"{_size(max(free, 0))} left, of {whose}" if known else "how much is left cannot be seen without /proc"
    text = (
        f"{left}; a group takes {_size(takes[2])} for the collectives of 2 ranks, {_size(takes[8])} for those of 8 (a "
        "memfd: the size of /dev/shm does not matter to it, only to MPI)"
    )
    if takes[2] > free:
        return Finding("memory", f"too little: {text}", State.FAILS, facts)
    return Finding("memory", text, State.REMARK if takes[8] > free or not known else State.FINE, facts)


def limits() -> Finding:
    """Finds the limits of this process that a group can run into."""
    soft = {
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes and threads of the user": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "bytes of address space": resource.getrlimit(resource.RLIMIT_AS)[0],
        "bytes in a file (and in a group's memory)": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
    }
    facts = {name: None if value == _UNLIMITED else value for name, value in soft.items()}
    text = ", ".join(f"{value} {name}" for name, value in facts.items() if value is not None)
    files = soft["open files"]
    if files != _UNLIMITED and files < _FEW_FILES:
        return Finding("limits", f"{text}: few files (ulimit -n) for groups of many ranks", State.REMARK, facts)
    return Finding("limits", text or "none", facts=facts)
