"""Which ranks share a host."""
import os
import socket
from dataclasses import asdict, dataclass

from .errors import TransportError
from .launcher import detect
from .liveness import started


@dataclass(frozen=True)
class Place:
    """Where a rank runs. Ranks share a host if their kernels' boot ids are equal: host names repeat
    and containers make them up; LOCAL_WORLD_SIZE says nothing about subgroups."""
    boot_id: str
    hostname: str
    pid: int
    uid: int
    started: int    # see liveness.py

    @classmethod
    def here(cls):
        try:
            with open("/proc/sys/kernel/random/boot_id") as f:
                boot_id = f.read().strip()
        except OSError as error:
            raise TransportError(f"cannot read this host's boot id: {error}") from error
        return cls(boot_id, socket.gethostname(), os.getpid(), os.geteuid(), started(os.getpid()))


def places(exchange):
    """The Place of every rank of the group, in rank order, on every rank."""
    here = Place.here()

    def meet(rank, value):
        place = Place(**value)
        if place.boot_id == here.boot_id:
            exchange.processes.add(rank, place.pid, place.started)

    table = exchange.gather_and_decide("place", asdict(here), lambda values: values, meet)
    for rank, value in enumerate(table):
        meet(rank, value)
    return [Place(**p) for p in table]


def by_host(all_places):
    """{boot id: its ranks}"""
    hosts = {}
    for rank, place in enumerate(all_places):
        hosts.setdefault(place.boot_id, []).append(rank)
    return hosts


def require_one_user(all_places):
    """Raises TransportError, on every rank alike, if the ranks of a host run as different users."""
    for ranks in by_host(all_places).values():
        users = {all_places[r].uid for r in ranks}
        if len(users) > 1:
            raise TransportError(f"ranks {ranks} run as different users (uids {sorted(users)}) of host "
                                 f"{all_places[ranks[0]].hostname}; the shared memory is private to one")


def require_mpi(exchange, all_places):
    """Raises TransportError, on every rank alike, unless an MPI launcher has started every rank."""
    def decide(found):
        if not all(found):
            where = "; ".join(f"{all_places[ranks[0]].hostname}: ranks {', '.join(map(str, ranks))}"
                              for ranks in by_host(all_places).values())
            raise TransportError(
                f"the ranks of this group run on several hosts ({where}), and not all were started by an MPI "
                "launcher. Between hosts this backend uses MPI, which only works among processes that mpirun "
                "(mpiexec, srun --mpi=...) has started: start the job with it, as in `mpirun -n 8 -hosts a,b "
                "python train.py`, instead of torchrun.")
    exchange.gather_and_decide("launcher", detect() is not None, decide)
