"""The MPI of a group that spans hosts: that of the launcher which started its ranks; or else one that is started over
the group's store, once in a process; or why there can be none, said alike on all ranks."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import TransportError
from ..launch import launcher, mpich_files, rendezvous
from ..launch import mpi_job as mpi
from ..launch.pmi import PmiServer
from .libmpi_sharing import may_share, sharing
from .reachable import require_reachable
from .topology import by_host, one_machine, packed, unpacked

if TYPE_CHECKING:
    from ..launch.mpi_job import Job
    from .exchange import Exchange
    from .topology import Location

_LAUNCHER, _STARTS, _RUNNING, _READY, _UNABLE = "launcher", "launcher starts", "running", "ready", "unable"
_SETTLE = 1.0  # s: how long a rank that SIGTERM ends waits for its libmpi to wait for an answer
_ONE_HOST = (
    "Else let the processes that join this group, one of each job, say, be on one host, where it takes no MPI; or make "
    'it by another backend ("gloo")'
)
_MPIRUN = "by mpirun (mpiexec, srun --mpi=...), as in `mpirun -n 8 -hosts a,b python train.py`"


def mpi_job(
    exchange: Exchange,
    places: Sequence[Location],
    members: Sequence[int],
    strangers: bool,
    watch: Callable[[], object] = lambda: None,
) -> Job:
    """This process's Job, which all ranks of the group are in. Collective over them; TransportError on all if they
    cannot be. ``members``: their global ranks; ``strangers``: they may be of several launchers' jobs; ``watch``:
    collective, called once hosts are known to reach each other, before MPI starts: ``exchange`` then hears of ranks
    that die on any host."""
    ranks = _Ranks(places, members, strangers)
    interface = None if all(place.has_mpi for place in places) else require_reachable(exchange, places)
    watch()
    how, alone, spare = exchange.gather_and_decide(
        "mpi job",
        _found(exchange.rank, places),
        lambda found: (_how(found, ranks), _alone(found, places), _spare(found, places)),
    )
    if how in (_LAUNCHER, _STARTS):
        job = mpi.job(exchange.left(), exchange.require_all_going_on)
        mpi.require_threads(job)
        if how == _STARTS:
            exchange.gather_and_decide("mpi started", None, lambda _: None)
            mpich_files.remove_files()
        return job
    if how == _RUNNING:
        return mpi.job()
    if spare or alone:
        mpich_files.do_without()
    server = PmiServer(exchange.rank, exchange.size, how, _nodes(places, alone), _StoredKeyValues(exchange))
    started: Job | None = None
    with mpich_files.removed_at_the_end(lambda: started or server.asked(_SETTLE)):
        started = mpi.start(server, exchange.left(), interface, exchange.require_all_going_on)
        exchange.gather_and_decide("mpi started", None, lambda _: None)
        mpich_files.remove_files()
    return started


def _nodes(places: Sequence[Location], alone: Sequence[str]) -> list[int]:
    """The number of each rank's host, as MPI is told: it shares memory between ranks of one, of which we have no use.
    On hosts that are ``alone`` it cannot, and each rank counts as one."""
    numbers: dict[str, int] = {}
    nodes = []
    for rank, place in enumerate(places):
        key = f"{rank}" if place.host in alone else place.host
        nodes.append(numbers.setdefault(key, len(numbers)))
    return nodes


class _StoredKeyValues:
    """What the ranks' libmpis tell each other (pmi.KeyValues), over the store. Rank 0 lays all of it down there, for
    those that ask: of a job of many hosts it is megabytes, which no store could hand to every rank."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._all: dict[str, str] = {}  # on rank 0

    def meet(self, barrier: int, put: dict[str, str]) -> None:
        def merge(said: list[str | None]) -> None:
            for put_there in said:
                self._all |= unpacked(put_there) if put_there else {}

        self._exchange.gather_and_decide(f"pmi/{barrier}", packed(put) if put else None, merge)
        if self._exchange.rank == 0:
            # With what was put before earlier barriers: what was laid down then is deleted by now.
            self._exchange.say(_key(barrier), packed(self._all))

    def all(self, barrier: int) -> dict[str, str]:
        return self._all or unpacked(self._exchange.hear(_key(barrier), "rank 0"))


def _key(barrier: int) -> str:
    return f"pmi/{barrier}/all"


def _found(rank: int, places: Sequence[Location]) -> dict[str, Any]:
    """What this rank has of an MPI."""
    try:
        job = mpi.begun()
        if job is not None and job.server:
            return {"kind": _RUNNING, "name": job.server.name}
        if job is not None or launcher.starts_mpi():
            named = launcher.job_name() or rendezvous.met_as()
            threads = mpi.lacks_threads(job) if job is not None else ""
            return {"kind": _LAUNCHER, "job": named, "starts": job is None, "threads": threads}
        left = mpich_files.megabytes()[0]
        return {"kind": _READY, "MPI": mpi.startable(), "sharing": sharing(rank, places), "MB": left}
    except TransportError as error:
        return {"kind": _UNABLE, "error": str(error)}


def _alone(found: list[dict[str, Any]], places: Sequence[Location]) -> list[str]:
    """The hosts between whose ranks MPI cannot share memory."""
    by = by_host(places)
    return [host for host, ranks in by.items() if not may_share([found[r].get("sharing") for r in ranks])]


def _spare(found: list[dict[str, Any]], places: Sequence[Location]) -> bool:
    """Whether /dev/shm is to be spared."""
    hosts = by_host(places).values()
    if "MPICH" not in found[0].get("MPI", ""):
        return False
    return any(mpich_files.spare(found[r].get("MB", math.inf), len(ranks)) for ranks in hosts for r in ranks)


def _how(found: list[dict[str, Any]], ranks: _Ranks) -> str:
    """_LAUNCHER; the same, of which some have yet to start MPI; _RUNNING; or the name of the job that is to start."""
    kinds = {rank["kind"] for rank in found}
    if kinds == {_LAUNCHER}:
        started = sorted({str(rank["job"]) for rank in found})
        if ranks.strangers and len(started) > 1:
            in_job = ranks.grouped(lambda r: f"in job {1 + started.index(found[r]['job'])}")
            raise TransportError(
                f"{ranks.several()}, and an MPI launcher started each of several jobs of them: {in_job}. Between hosts "
                f"this backend uses MPI, by which no job reaches another. {_ONE_HOST}"
            )
        if any(rank.get("threads") for rank in found):
            lacking = ranks.grouped(lambda r: found[r].get("threads") or "has it")
            raise TransportError(f"{ranks.several()}, between which this backend uses MPI: {lacking}")
        return _STARTS if any(rank["starts"] for rank in found) else _LAUNCHER
    if _LAUNCHER in kinds:
        raise TransportError(
            f"{ranks.several()}, and an MPI launcher started some of them only: "
            f"{ranks.grouped(lambda r: 'by a launcher' if found[r]['kind'] == _LAUNCHER else 'not')}. Start all of "
            f"them {_MPIRUN}, or none: by torchrun, say"
        )
    if _UNABLE in kinds:
        raise TransportError(
            f"{ranks.several()}, between which this backend uses MPI, and it cannot start: "
            f"{ranks.grouped(lambda r: found[r].get('error', 'could'))}.{one_machine(ranks.places)}"
        )
    jobs = sorted({str(rank["name"]) for rank in found if rank["kind"] == _RUNNING})
    if kinds == {_RUNNING} and len(jobs) == 1:
        return _RUNNING
    if jobs:
        in_job = ranks.grouped(
            lambda r: f"in job {1 + jobs.index(found[r]['name'])}" if "name" in found[r] else "in none"
        )
        advice = (
            f"Let that be this one, before either job makes another over hosts. {_ONE_HOST}"
            if ranks.strangers
            else 'Let that be a group of all ranks, as init_process_group("custom") makes it'
        )
        raise TransportError(
            f"{ranks.several()}, and are not in one MPI job: {in_job}. Where no launcher started MPI, it starts once "
            f"in a process, for the ranks of the first group that spans hosts, and no other rank can join. {advice}"
        )
    if len({rank["MPI"] for rank in found}) > 1:
        raise TransportError(
            f"{ranks.several()}, and have different versions of an MPI: "
            f"{ranks.grouped(lambda r: found[r]['MPI'].partition(chr(10))[0])}. Install the same on every host"
        )
    if "MPICH" in found[0]["MPI"]:
        here = {r: len(same) for same in by_host(ranks.places).values() for r in same}
        lacks = [mpich_files.too_little(rank["MB"], here[r]) for r, rank in enumerate(found)]
        if any(lacks):
            raise TransportError(
                f"{ranks.several()}, between which this backend uses MPI, and it cannot start: "
                f"{ranks.grouped(lambda r: lacks[r] or 'could')}"
            )
    return uuid.uuid4().hex


class _Ranks:
    """The group's ranks, for errors: ``members`` are their global ones, of ``strangers`` those in the group."""

    def __init__(self, places: Sequence[Location], members: Sequence[int], strangers: bool = False) -> None:
        self.places, self.members, self.strangers = places, members, strangers

    def several(self) -> str:
        return f"the ranks of this group run on several hosts ({self.grouped(lambda _: None)})"

    def grouped(self, what: Callable[[int], str | None]) -> str:
        """Ranks of one host of which the same is said together."""
        groups: dict[tuple[str, str | None], list[str]] = {}
        for host in by_host(self.places).values():
            for r in host:
                groups.setdefault((self.places[r].host, what(r)), []).append(str(self.members[r]))
        names = {place.host: place.hostname for place in self.places}
        return "; ".join(
            f"{names[host]}: rank{'s' * (len(same) > 1)} {', '.join(same)}" + (f": {said}" if said else "")
            for (host, said), same in groups.items()
        )
