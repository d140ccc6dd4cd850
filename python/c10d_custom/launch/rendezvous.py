"""How the ranks of an MPI job find each other, and at which address rank 0 is reached: ``env://`` where it would
otherwise fail, and ``mpi://``.

We act if and only if either
- init_method is "mpi://", whatever the backend's name, or
- init_method is "env://" (the default), the group is to be of this backend (or C10D_CUSTOM_LAUNCHER is "import"; the
  package's __init__.py decides), MASTER_ADDR is unset, C10D_CUSTOM_LAUNCHER is not 0, mpi4py is installed, and an MPI
  launcher started this process: RANK is unset, or is what `launcher.fill_environment` gave to this process.
In the second case torch's own handler would raise, because it needs MASTER_ADDR. All else goes to it.

Rank 0 serves a TCPStore on a port the kernel chooses and offers its addresses over MPI; all use the first
that all can reach. Host names play no part: a host's own name may resolve to 127.0.1.1. MASTER_ADDR and
MASTER_PORT are then set for scripts that read them; as long as they stay as set here they count as unset,
so that init_process_group after destroy_process_group makes another store."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

from ..call import seconds_of
from ..config import launcher_wanted
from ..errors import TransportError, UsageError
from ..host import boot_id, host_key, network
from ..threads import socket
from . import launcher
from .addresses import addresses
from .mpi_job import INSTALL, job
from .mpich_files import remove_files
from .tcp_store import tcp_store

if TYPE_CHECKING:
    from torch.distributed import Store

    from .mpi_job import Job

    Rendezvous = tuple[Store, int, int]  # the store, this rank, how many ranks


CONNECT_SECONDS = 5.0  # for one address; a wrong one usually refuses at once

_master: dict[str, str] = {}  # MASTER_ADDR and MASTER_PORT as we set them
_met: list[str] = []  # of this process's job, what names it


def met_as() -> str:
    """What names this process's MPI job, alike on all its ranks, and no other; "" where they have not met here."""
    return _met[0] if _met else ""


def env_rendezvous(
    original: Callable[..., Iterator[Rendezvous]], url: str, *args: Any, **kwargs: Any
) -> Iterator[Rendezvous]:
    """The handler of ``env://``; ``original``: torch's own."""
    if not _applies():
        if "MASTER_ADDR" in os.environ:  # where to meet, the program has said
            launcher.fill_environment()
        return original(url, *args, **kwargs)
    if find_spec("mpi4py") is None:
        return _noted(original(url, *args, **kwargs))
    return _filling_in(mpi_rendezvous(url, *args, **kwargs))


def _filling_in(steps: Iterator[Rendezvous]) -> Iterator[Rendezvous]:
    """Sets the variables that scripts read once they have a group."""
    for step in steps:
        launcher.fill_environment()
        yield step


def _noted(steps: Iterator[Rendezvous]) -> Iterator[Rendezvous]:
    try:
        yield from steps
    except ValueError as error:
        error.add_note(f"An MPI launcher started this process, but mpi4py is not installed: {INSTALL}")
        raise


def _applies() -> bool:
    addressed = "MASTER_ADDR" in os.environ and not _is_ours()
    if addressed or not launcher_wanted():
        return False
    return launcher.filled() or ("RANK" not in os.environ and launcher.detect() is not None)


def _is_ours() -> bool:
    return bool(_master) and all(os.environ.get(name) == value for name, value in _master.items())


def mpi_rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[Rendezvous]:
    seconds = seconds_of(timeout)
    deadline = time.monotonic() + seconds
    mpi = job(seconds)
    try:
        _refuse_contradictions(mpi, dict(parse_qsl(urlparse(url).query)))
        store = _Meeting(mpi, timeout, deadline).store()
    finally:
        remove_files()  # all have started, or will not meet
    yield store, mpi.rank, mpi.size
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def _refuse_contradictions(mpi: Job, query: dict[str, str]) -> None:
    for what, name, real in (("rank", "RANK", mpi.rank), ("world_size", "WORLD_SIZE", mpi.size)):
        for source, text in ((f"the argument {what}", query.get(what)), (name, os.environ.get(name))):
            if text is not None and text != str(real):
                raise UsageError(
                    f"{source} says {text}, but MPI says {real}. "
                    "Leave it out, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, all four, to go without MPI."
                )


class _Meeting:
    """One rendezvous: collective over the job, each step before the one deadline."""

    def __init__(self, mpi: Job, timeout: timedelta, deadline: float) -> None:
        self.mpi, self.timeout, self.deadline = mpi, timeout, deadline

    def store(self) -> Store:
        local = self._ranks_here()
        own, offer = None, None
        if self.mpi.rank == 0:
            own, offer = self._serve(one_host=len(local) == self.mpi.size)
        offer = self._broadcast(offer)
        if "error" in offer:
            raise TransportError(f"rendezvous: rank 0 cannot serve a store: {offer['error']}")
        for address in offer["addresses"]:
            store = own or self._connect(address, offer)
            if self._all(store is not None) and store is not None:
                self._tell_scripts(local, address, offer["port"])
                _met[:] = [offer["token"]]
                store.set_timeout(self.timeout)
                return store
        raise TransportError(
            f"rendezvous: no address of rank 0's host is reachable from all ranks; tried {offer['addresses']}, port "
            f"{offer['port']}. Is there a firewall, or a network that only some hosts have?"
        )

    def _wait(self, request: Any, what: str) -> None:
        if not self.mpi.wait_all([request], self.deadline):
            raise TransportError(
                f"rendezvous: rank {self.mpi.rank} waited {self.timeout.total_seconds():.0f} s for {what}; "
                f"do all {self.mpi.size} ranks of the MPI job call init_process_group?"
            )

    def _ranks_here(self) -> list[int]:
        """The ranks on this host, in order."""
        mine = hashlib.sha256(host_key(boot_id(), network()).encode()).digest()
        every = bytearray(len(mine) * self.mpi.size)
        self._wait(self.mpi.world.Iallgather(mine, every), "the other ranks")
        width = len(mine)
        return [r for r in range(self.mpi.size) if every[r * width : (r + 1) * width] == mine]

    def _broadcast(self, value: Any) -> Any:
        text = bytearray(json.dumps(value).encode())
        length = bytearray(struct.pack("q", len(text)))
        self._wait(self.mpi.world.Ibcast(length, 0), "rank 0")
        if self.mpi.rank:
            text = bytearray(struct.unpack("q", length)[0])
        self._wait(self.mpi.world.Ibcast(text, 0), "rank 0")
        return json.loads(text)

    def _all(self, good: bool) -> bool:
        mine, every = bytearray([good]), bytearray(1)
        self._wait(
            self.mpi.world.Iallreduce([mine, self.mpi.MPI.BYTE], [every, self.mpi.MPI.BYTE], self.mpi.MPI.BAND),
            "the other ranks to connect",
        )
        return bool(every[0])

    def _serve(self, one_host: bool) -> tuple[Store | None, dict[str, Any]]:
        """Rank 0's store, and what the others need to reach it. Its own connection is to loopback."""
        token = uuid.uuid4().hex
        try:
            store = tcp_store("127.0.0.1", 0, True, self._left(), self.mpi.size)
            store.set("mpi/token", token)
        except Exception as error:
            return None, {"error": str(error)}
        found = addresses()
        return store, {"addresses": ["127.0.0.1", *found] if one_host else found, "port": store.port, "token": token}

    def _connect(self, address: str, offer: dict[str, Any]) -> Store | None:
        """A connection to rank 0's store, or None: nobody listens there, or somebody else does. (Private
        addresses repeat: that of a container bridge is every host's.)"""
        seconds = min(CONNECT_SECONDS, self._left())
        try:
            socket.create_connection((address, offer["port"]), seconds).close()
            store = tcp_store(address, offer["port"], False, seconds, self.mpi.size)
            return store if store.get("mpi/token").decode() == offer["token"] else None
        except (OSError, RuntimeError, UnicodeDecodeError):
            return None

    def _left(self) -> float:
        return max(0.1, self.deadline - time.monotonic())

    def _tell_scripts(self, local: list[int], address: str, port: int) -> None:
        if "MASTER_ADDR" not in os.environ or _is_ours():
            _master.update(MASTER_ADDR=address, MASTER_PORT=str(port))
            os.environ.update(_master)
        for name, value in (("LOCAL_RANK", local.index(self.mpi.rank)), ("LOCAL_WORLD_SIZE", len(local))):
            os.environ.setdefault(name, str(value))
