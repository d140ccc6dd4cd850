"""Which addresses this host has at which others may reach it, without third-party packages."""

from __future__ import annotations

import fcntl
import struct

from ..threads import socket

_SIOCGIFADDR = 0x8915
_QUEUE = 4096  # connections not accepted yet; the kernel's own limit is mostly lower


def listen(everywhere: bool = True) -> socket.socket:
    """A server on a port that the kernel chooses. ``everywhere``: peers are on other hosts, too; else nobody beyond
    this one can connect."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=_QUEUE)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_QUEUE, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_QUEUE)


def addresses() -> list[str]:
    """This host's addresses that others may reach: the interfaces' own, IPv4 first, no loopback."""
    return list(interfaces())


def interfaces() -> dict[str, str]:
    """{address: its interface} of `addresses`, in their order."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            found[socket.inet_ntoa(answer[20:24])] = name
    try:
        with open("/proc/net/if_inet6") as f:
            lines = [line.split() for line in f]
    except OSError:
        lines = []  # a kernel without IPv6
    for text, _, _, scope, _, name in lines:
        if scope == "00":
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(text))] = name
    return {address: name for address, name in found.items() if not address.startswith("127.")}
