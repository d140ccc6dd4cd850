"""Whether ranks of this host can come to hold one memory, and see each other: all that transport/shm/segment.py,
creation/ and the core ask the system for, asked here.

Descriptors go over an abstract Unix socket. Nobody opens /proc/PID/fd or calls pidfd_getfd: what these need (yama's
ptrace_scope, the capability to trace) plays no part."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from .finding import Finding, State

_SMALL = Config(block_bytes=4096, window=2, small_bytes=64, cell_bytes=64, cells=4)
_SECONDS = 5.0


@dataclass(frozen=True)
class Need:
    """``probe`` raises OSError where the system refuses it; ``without``: what then becomes of groups."""

    name: str
    probe: Callable[[], None]
    without: str
    state: State = State.FAILS


def _memfd() -> None:
    os.close(os.memfd_create("c10d_custom-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def _segment() -> None:
    """Makes, seals, maps and locks a segment, as the core does."""
    try:
        from ..native import Interrupted, lib
    except OSError as error:
        raise ImportError(str(error)) from error
    from ..transport.shm.segment import geometry

    total, handle = c_uint64(), c_void_p()
    fd = lib.c10d_segment_create(byref(geometry(_SMALL, 2, 0)), byref(total))
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    if failed := lib.c10d_open(fd, 0, 0, Interrupted(), byref(handle)):
        raise OSError(failed, os.strerror(failed))
    lib.c10d_free(handle)


def _hand_over() -> None:
    """A descriptor, through a socket without a name in any file system, between two who know each other's user."""
    with contextlib.ExitStack() as closing:
        server, asking = (closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(2))
        for end in (server, asking):
            end.settimeout(_SECONDS)
        name = f"\0c10d_custom-doctor-{secrets.token_hex(16)}"
        server.bind(name)
        server.listen(1)
        asking.connect(name)
        giving = closing.enter_context(server.accept()[0])
        for end in (giving, asking):
            user = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if user != os.geteuid():
                raise OSError(errno.EPERM, f"the kernel takes this process for one of user {user}")
        socket.send_fds(giving, [b"s"], [server.fileno()])
        _, got, *_ = socket.recv_fds(asking, 1, 1)
        for fd in got:
            os.close(fd)
        if len(got) != 1:
            raise OSError(errno.EMFILE, "the descriptor did not arrive")


def _thread() -> None:
    thread = threading.Thread(target=int)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    thread.join()


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _proc() -> None:
    from ..creation import started

    if started(os.getpid()) is None:
        raise OSError(errno.ENOENT, "no /proc/PID/stat")
    with open(f"/proc/{os.getpid()}/maps", "rb"):
        os.stat("/proc/self/ns/pid")


NEEDS = (
    Need("memfd_create", _memfd, "groups lie in /dev/shm, whose size then matters", State.REMARK),
    Need("a sealed, mapped, locked segment", _segment, "no group can be made"),
    Need("descriptors over Unix sockets", _hand_over, "no group of more than one rank can be made"),
    Need("threads", _thread, "no group can be made"),
    Need(
        "pidfd_open",
        _pidfd,
        "a rank that dies while a group is being made is noticed only at the time-out",
        State.REMARK,
    ),
    Need("/proc", _proc, "a rank that has died, or is stopped, may not be told from one that is late", State.REMARK),
)


def sharing() -> Finding:
    """Finds what the system refuses of NEEDS."""
    refused: list[tuple[Need, str]] = []
    for need in NEEDS:
        try:
            need.probe()
        except ImportError:
            continue  # no core: software.py tells
        except OSError as error:
            refused.append((need, error.strerror or str(error)))
    filtered = False
    with contextlib.suppress(OSError):
        filtered = "\nSeccomp:\t2\n" in Path("/proc/self/status").read_text()
    why = {need.name: text for need, text in refused}
    facts: dict[str, Any] = {
        "asked": {need.name: why.get(need.name, "works") for need in NEEDS},
        "seccomp_filter": filtered,
    }
    if not refused:
        names = ", ".join(need.name for need in NEEDS)
        return Finding("sharing", f"{names}: all work (no other process's descriptors are opened)", facts=facts)
    worst = max(need.state for need, _ in refused)
    by_effect: dict[str, list[str]] = {}
    for need, text in refused:
        if need.state is worst:
            by_effect.setdefault(need.without, []).append(f"{need.name} ({text})")
    said = "; ".join(f"refused: {', '.join(names)}: {effect}" for effect, names in by_effect.items())
    said += ". A seccomp filter is on this process: a container's?" if filtered else ""
    return Finding("sharing", said, worst, facts)


def host() -> Finding:
    """What makes two ranks be of one host, and what they must have in common there."""
    from ..creation.topology import Location
    from ..errors import TransportError

    try:
        here = Location.here()
    except TransportError as error:
        return Finding("host", f"no group can be made: {error}", State.FAILS)
    facts: dict[str, Any] = {
        "boot_id": here.boot_id,
        "network_namespace": here.network,
        "hostname": here.hostname,
        "user": here.uid,
    }
    text = (
        f"boot id {here.boot_id}, network namespace {here.network}, user {here.uid}: "
        "ranks of whom all three are equal share memory"
    )
    return Finding("host", text, facts=facts)
