"""The store at which the members of a new group meet, when the one of the old group may have ended with a rank: the
first of them serves it, the others reach it with a deadline."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistError, TCPStore

from ..errors import TransportError
from ..threads import socket

_CONNECT = timedelta(seconds=2)


def serve(seconds: float) -> TCPStore:
    """A store on a port that the kernel chooses; ``seconds``: for its calls."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=max(seconds, 0.001)), wait_for_workers=False)


def connect(address: str, port: int, wait: timedelta = _CONNECT) -> TCPStore:
    """TransportError where nobody answers."""
    try:
        # TCPStore goes on trying where nobody listens any more.
        socket.create_connection((address, port), wait.total_seconds()).close()
        return TCPStore(address, port, None, False, wait, wait_for_workers=False)
    except (OSError, DistError) as error:
        raise TransportError(f"the new store does not answer at {address}, port {port}: {error}") from error
