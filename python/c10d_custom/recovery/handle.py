"""How a process is met by those that it is to make groups with, whoever started them: its `Handle`, a text that a
program passes on as it likes. It names the process, its host, its mailbox (creation/local_datagrams.py) and the store
that it serves; who cannot serve or reach a store hears so in time."""

from __future__ import annotations

import functools
import secrets
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError

from .._version import described
from ..creation import started
from ..creation.bounded_store import answered
from ..creation.libmpi_sharing import namespace
from ..creation.local_datagrams import mailbox
from ..creation.topology import Location, packed, unpacked
from ..errors import TransportError, UsageError
from ..launch.addresses import addresses
from ..launch.tcp_store import tcp_store
from ..threads import socket

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_SCHEME = "custom"
_WAIT, _CONNECT = 1.0, 2.0  # s: for one of a member's addresses; for the only one of a store
_IDENTITY = "identity"


def serve(seconds: float) -> TCPStore:
    """A store on a port that the kernel chooses; ``seconds``: for its calls."""
    return tcp_store("127.0.0.1", 0, True, seconds)


class NotServedError(TransportError):
    """Nobody serves a store at that address any more: to ask again is in vain."""


def connect(address: str, port: int, seconds: float = _CONNECT, identity: str = "") -> TCPStore:
    """TransportError where nobody answers in that time; NotServedError where nobody listens, or an Endpoint of another
    identity."""

    def connected() -> TCPStore:
        # TCPStore goes on trying where nobody listens any more, for its time-out; which says nothing of one that is
        # stopped.
        least = min(seconds, _CONNECT)
        socket.create_connection((address, port), least).close()
        store = tcp_store(address, port, False, least)
        if identity and not (store.check([_IDENTITY]) and store.get(_IDENTITY).decode() == identity):
            raise NotServedError("it is another process's")
        return store

    try:
        store: TCPStore = answered(connected, seconds)
        return store
    except (OSError, DistError) as error:
        kind = NotServedError if isinstance(error, ConnectionRefusedError) else TransportError
        raise kind(f"the new store does not answer at {address}, port {port}: {error}") from error


class Handle:
    """``text``: scheme, host name, PID, an identity that no other has, and the rest, separated by colons. UsageError if
    it is none of this revision of the package."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            scheme, self.hostname, self.pid, self.identity, rest = text.split(":")
            said: dict[str, Any] = unpacked(rest)
            if scheme != _SCHEME or said["revision"] != described():
                raise ValueError(said["revision"])
            self.place = Location(**said["place"])
            self.addresses, self.port, self.sees = said["addresses"], said["port"], said["sees"]
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise UsageError(
                f"reconfigure: {text[:60]!r} is no handle of this revision of c10d-custom, {described()} ({error!r}). "
                "Give what dist._get_reconfigure_handle() returns of a group of the same revision that was made by "
                'init_process_group("custom", enable_reconfigure=True).'
            ) from None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.hostname} (handle {_SCHEME}:{self.hostname}:{self.pid}:{self.identity})"

    def has_ended(self) -> bool:
        """Whether its process is known to have: of one on another host, or in another PID namespace, nobody knows."""
        return self.sees == _pid_namespace() and started(self.place.pid) != self.place.started

    def store(self, seconds: float = _WAIT) -> TCPStore:
        """The store that it serves. TransportError where that cannot be reached, or is silent for so long;
        NotServedError where each address says that there is none."""
        tried: list[TransportError] = []
        here = self.place.host == Location.here().host
        for address in ["127.0.0.1"] if here else self.addresses:
            try:
                return connect(address, self.port, seconds, self.identity)
            except TransportError as error:
                tried.append(error)
        kind = NotServedError if all(isinstance(error, NotServedError) for error in tried) else TransportError
        raise kind(f"{self} does not answer: {'; '.join(map(str, tried)) or 'it has no network address'}")


def _pid_namespace() -> list[str | int]:
    return [Location.here().boot_id, namespace("pid")]


@functools.lru_cache(1024)
def handle_of(text: str) -> Handle:
    return Handle(text)


class Endpoint:
    """Where other processes reach this one, for one process group: its mailbox and its store; ``handle`` names both.
    ``used``: numbers that were given before, whether or not the group was made."""

    def __init__(self, seconds: float) -> None:
        self.used: list[int] = []
        self.mailbox = mailbox()
        self.store = serve(seconds)
        identity = secrets.token_hex(8)
        self.store.set(_IDENTITY, identity)
        self._reached: tuple[str, TCPStore] | None = None
        place = Location.here(self.mailbox.name if self.mailbox else "")
        said = {
            "revision": described(),
            "place": place.described(),
            "addresses": addresses(),
            "port": self.store.port,
            "sees": _pid_namespace(),
        }
        hostname = place.hostname.replace(":", "_")
        self.handle = Handle(f"{_SCHEME}:{hostname}:{place.pid}:{identity}:{packed(said)}")

    def store_of(self, member: Handle, seconds: float) -> TCPStore:
        """A member's own store; the connection is kept, for the next group that it serves, until `forget`."""
        if member.identity == self.handle.identity:
            return self.store
        if self._reached is None or self._reached[0] != member.identity:
            self._reached = member.identity, member.store(seconds)
        return self._reached[1]

    def forget(self) -> None:
        """The connection may be of no more use."""
        self._reached = None

    def close(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()
        del self.store, self._reached
