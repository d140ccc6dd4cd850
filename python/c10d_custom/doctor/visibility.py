"""Whether ranks of this host see each other, and where they then lie: what the system may refuse without that a group
fails. All else that groups ask of it, the self-test asks; its error says what was refused."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

from .finding import Finding, State


def _memfd() -> None:
    os.close(os.memfd_create("c10d_custom-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _proc() -> None:
    from ..creation import started

    if started(os.getpid()) is None:
        raise OSError(errno.ENOENT, "no /proc/PID/stat")
    with open(f"/proc/{os.getpid()}/maps", "rb"):
        os.stat("/proc/self/ns/pid")


# Name, what raises OSError where the system refuses it, what then becomes of groups.
NEEDS = (
    ("memfd_create", _memfd, "groups lie in /dev/shm, whose size then matters"),
    ("pidfd_open", _pidfd, "a rank that dies while a group is being made is noticed only at the time-out"),
    ("/proc", _proc, "a rank that has died, or is stopped, may not be told from one that is late"),
)


def sharing() -> Finding:
    """Finds what the system refuses of NEEDS."""
    asked, refused = dict.fromkeys((name for name, *_ in NEEDS), "works"), list[str]()
    for name, probe, without in NEEDS:
        try:
            probe()
        except OSError as error:
            asked[name] = error.strerror or str(error)
            refused.append(f"refused: {name} ({asked[name]}): {without}")
    filtered = False
    with contextlib.suppress(OSError):
        filtered = "\nSeccomp:\t2\n" in Path("/proc/self/status").read_text()
    facts: dict[str, Any] = {"asked": asked, "seccomp_filter": filtered}
    if not refused:
        return Finding("sharing", f"{', '.join(asked)}: all work", facts=facts)
    said = "; ".join(refused) + ". A seccomp filter is on this process: a container's?" * filtered
    return Finding("sharing", said, State.REMARK, facts)


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
