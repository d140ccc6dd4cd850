"""Where the ranks of a group run, as all of them are told, and which of them share a host."""

from __future__ import annotations

import base64
import json
import os
import sys
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._version import described
from ..errors import TransportError
from ..host import boot_id, host_key, network
from ..threads import socket
from . import started

if TYPE_CHECKING:
    from .exchange import Exchange


FIRST_TOPIC = "place"  # of all that ranks tell each other
_REVISION = "c10d-custom"


class Location:
    """Where a rank runs. Which ranks share a host, `host_key` says (host.py); LOCAL_WORLD_SIZE says nothing
    about subgroups. ``started``: see `started`; ``mailbox``: see
    local_datagrams.py, "" where it has none; ``has_mpi``: its process has begun to use MPI."""

    __slots__ = ("boot_id", "hostname", "pid", "uid", "started", "network", "mailbox", "has_mpi")

    def __init__(
        self,
        boot_id: str,
        hostname: str,
        pid: int,
        uid: int,
        started: int | None,
        network: int,
        mailbox: str = "",
        has_mpi: bool = False,
    ) -> None:
        self.boot_id, self.hostname, self.pid, self.uid = boot_id, hostname, pid, uid
        self.started, self.network, self.mailbox, self.has_mpi = started, network, mailbox, has_mpi

    def described(self) -> dict[str, Any]:
        """The arguments that make it."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def host(self) -> str:
        return host_key(self.boot_id, self.network)

    @classmethod
    def here(cls, mailbox: str = "") -> Location:
        pid = os.getpid()
        return cls(boot_id(), _host_name(), pid, os.geteuid(), started(pid), network(), mailbox, _mpi_has_begun())


def _host_name() -> str:
    try:
        return socket.gethostname()
    except OSError:  # a sandbox refuses uname
        return "?"


def _mpi_has_begun() -> bool:
    # Not imported for this: a group on one host does without.
    mpi_job = sys.modules.get("c10d_custom.launch.mpi_job")
    return mpi_job is not None and mpi_job.has_begun()


def locations(exchange: Exchange, mailbox: str = "") -> tuple[list[Location], bool]:
    """The Location of every rank of the group, in rank order, on every rank. And whether they are to go on by letters
    (local_datagrams.py): then rank 0 tells ``exchange`` when all have gone on."""
    here = Location.here(mailbox)
    # The first word of all, and in this form in every revision of the package: ranks of two tell each other by it.
    word = {_REVISION: described(), **here.described()}

    def meet(rank: int, value: dict[str, Any]) -> None:
        _require_one_revision(rank, value, exchange.rank, word)
        if value["boot_id"] == here.boot_id:
            exchange.processes.add(rank, value["pid"], value["started"])

    def decide(said: list[dict[str, Any]]) -> dict[str, Any]:
        said = [{name: what for name, what in value.items() if name != _REVISION} for value in said]
        places = [Location(**value) for value in said]
        _require_one_user(places)
        by_letters = _can_write(places)
        if not by_letters:  # random names cannot be compressed: they would take three times all the rest
            said = [{**value, "mailbox": ""} for value in said]
        return {"table": packed(said), "by letters": by_letters}

    decided = exchange.gather_and_decide(
        FIRST_TOPIC, word, decide, meet, heard_later=lambda decided: decided["by letters"]
    )
    places = [Location(**value) for value in unpacked(decided["table"])]
    for rank, place in enumerate(places):
        # Inside a host rank 0 watches all and tells; were each to watch each, their number would be a square.
        if (not decided["by letters"] or rank == 0) and place.boot_id == here.boot_id:
            exchange.processes.add(rank, place.pid, place.started)
    return places, decided["by letters"]


def _require_one_revision(rank: int, theirs: dict[str, Any], own: int, mine: dict[str, Any]) -> None:
    if theirs.get(_REVISION) != mine[_REVISION]:
        each = "; ".join(
            f"rank {r} ({word.get('hostname')}): {word.get(_REVISION, 'an older one, which does not say')}"
            for r, word in sorted([(rank, theirs), (own, mine)], key=lambda one: one[0])
        )
        raise TransportError(f"the ranks have different revisions of c10d-custom: {each}. Install the same for all")


def _can_write(places: Sequence[Location]) -> bool:
    """Whether all of them can write each other letters."""
    return all(place.mailbox for place in places) and len({(place.host, place.uid) for place in places}) == 1


def by_host(all_places: Sequence[Location]) -> dict[str, list[int]]:
    """{Location.host: its ranks}"""
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(all_places):
        hosts.setdefault(place.host, []).append(rank)
    return hosts


def _require_one_user(all_places: Sequence[Location]) -> None:
    """Raises TransportError if the ranks of a host run as different users."""
    for ranks in by_host(all_places).values():
        users = {all_places[r].uid for r in ranks}
        if len(users) > 1:
            raise TransportError(
                f"ranks {ranks} run as different users (uids {sorted(users)}) of host "
                f"{all_places[ranks[0]].hostname}; the shared memory is private to one"
            )


def one_machine(all_places: Sequence[Location]) -> str:
    """Why ranks of one machine count as on several hosts, for an error's end."""
    machines: dict[str, list[int]] = {}
    for ranks in by_host(all_places).values():
        machines.setdefault(all_places[ranks[0]].boot_id, []).append(ranks[0])
    apart = next((ranks for ranks in machines.values() if len(ranks) > 1), None)
    if apart is None:
        return ""
    return (
        f" Ranks {' and '.join(map(str, apart))} are on one machine, but in network namespaces of their own, as the "
        "containers of "
        "different pods are: they cannot hand each other shared memory. Run them in one pod, or with the host's "
        "network "
        "(docker run --network=host)."
    )


def packed(value: Any) -> str:
    """Of what JSON can express: short text, for what many ranks say of themselves is much alike, and the store's one
    server hands it to all of them."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))
