"""The IPv4 addresses of this host, without third-party packages."""
import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def local_addresses():
    """Of every interface that has one, but for loopback, in the order of the interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    found.append(address)
    return found
