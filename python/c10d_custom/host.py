"""Which host this process is on: a kernel, and in it a network namespace, in which the ranks of a host hand each other
their shared memory. Two pods of one machine are two hosts; names repeat, and containers make them up."""

from __future__ import annotations

import os

from .errors import DOCTOR, TransportError


def boot_id() -> str:
    """Returns the boot id of the running kernel. TransportError where it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError as error:
        raise TransportError(f"cannot read this host's boot id: {error} ({DOCTOR})") from error


def network() -> int:
    """This process's network namespace: of one boot id, equal numbers are the same."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0  # a kernel without network namespaces


def host_key(boot: str, namespace: int) -> str:
    """What names a host: ranks share one if, and only if, theirs are equal. ``boot``, ``namespace``: what `boot_id` and
    `network` say to them."""
    return f"{boot}/{namespace}"
