"""The store at which the members of a new group meet, when the one of the old group may have ended with a rank: the
first of them serves it, the others reach it with a deadline."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistError, TCPStore

from ..creation.bounded_store import answered
from ..errors import TransportError
from ..threads import socket

_CONNECT = 2.0  # s


def serve(seconds: float) -> TCPStore:
    """A store on a port that the kernel chooses; ``seconds``: for its calls."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=max(seconds, 0.001)), wait_for_workers=False)


def connect(address: str, port: int, seconds: float = _CONNECT, holds: tuple[str, str] | None = None) -> TCPStore:
    """TransportError where nobody answers in that time, or a store that does not hold that value under that key."""

    def connected() -> TCPStore:
        # TCPStore goes on trying where nobody listens any more, for its time-out; which says nothing of one that is
        # stopped.
        least = min(seconds, _CONNECT)
        socket.create_connection((address, port), least).close()
        store = TCPStore(address, port, None, False, timedelta(seconds=least), wait_for_workers=False)
        if holds is not None and not (store.check([holds[0]]) and store.get(holds[0]).decode() == holds[1]):
            raise TransportError("it is another process's")
        return store

    try:
        store: TCPStore = answered(connected, seconds)
        return store
    except (OSError, DistError) as error:
        raise TransportError(f"the new store does not answer at {address}, port {port}: {error}") from error
