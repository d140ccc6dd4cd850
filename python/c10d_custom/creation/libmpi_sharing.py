"""Whether libmpi can share memory between the ranks of a host, as libraries of the MPICH family do where they are told
of one: each must see the others' processes and files, may have to read their memory, and needs room in /dev/shm. In
containers of their own, or behind a strict seccomp filter, ranks cannot, and libmpi then ends their processes."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .topology import by_host

if TYPE_CHECKING:
    from .topology import Location

_NAMESPACES = "pid", "mnt", "ipc", "user"


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def sharing(rank: int, places: Sequence[Location]) -> dict[str, Any]:
    """What this rank finds, for `may_share`."""
    here = by_host(places)[places[rank].host]
    after = here[(here.index(rank) + 1) % len(here)]
    return {"namespaces": _namespaces(), "reads": _may_read(places[after].pid)}


def may_share(said: Sequence[dict[str, Any] | None]) -> bool:
    """``said``: by the ranks of one host; None: by one that starts no MPI."""
    if len(said) == 1 or any(one is None for one in said):
        return True
    found = [one for one in said if one is not None]
    return len({str(one["namespaces"]) for one in found}) == 1 and all(one["reads"] for one in found)


def _namespaces() -> list[int]:
    """Which this process is in. One that is not to be seen is some other one's."""
    return [namespace(name) for name in _NAMESPACES]


def namespace(name: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{name}").st_ino
    except OSError:
        return -os.getpid()


def _may_read(pid: int) -> bool:
    """Whether this process may read that one's memory: the kernel says so before it finds that nothing is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.create_string_buffer(1)
    mine, theirs = _IoVec(ctypes.addressof(byte), 1), _IoVec(None, 1)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    read = libc.process_vm_readv(
        ctypes.c_int(pid),
        ctypes.byref(mine),
        ctypes.c_ulong(1),
        ctypes.byref(theirs),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    return read >= 0 or ctypes.get_errno() == errno.EFAULT
