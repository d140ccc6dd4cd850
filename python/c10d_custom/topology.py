"""Which ranks share a host, and the exchange through the Store that finds it out."""
import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from .errors import TransportError
from .launcher import detect


@dataclass(frozen=True)
class Place:
    """Where a rank runs. Ranks share a host if their kernels' boot ids are equal: host names repeat
    and containers make them up; LOCAL_WORLD_SIZE says nothing about subgroups."""
    boot_id: str
    hostname: str
    pid: int
    uid: int

    @classmethod
    def here(cls):
        try:
            with open("/proc/sys/kernel/random/boot_id") as f:
                boot_id = f.read().strip()
        except OSError as error:
            raise TransportError(f"cannot read this host's boot id: {error}") from error
        return cls(boot_id, socket.gethostname(), os.getpid(), os.geteuid())


class Exchange:
    """One group's words through its Store, each said once, each wait with a deadline."""

    def __init__(self, store, rank, size, seconds):
        self.store, self.rank, self.size = store, rank, size
        self.deadline = time.monotonic() + seconds
        self.started = time.monotonic()

    def left(self):
        return max(0.001, self.deadline - time.monotonic())

    def say(self, key, value):
        self.store.set(key, json.dumps(value))

    def hear(self, key, who):
        try:
            self.store.wait([key], timedelta(seconds=self.left()))
        except RuntimeError as error:
            raise TransportError(
                f"group creation: rank {self.rank} heard nothing from {who} for "
                f"{time.monotonic() - self.started:.1f} s; did it start, and does it call "
                f"init_process_group (or new_group) with the same ranks? ({error})") from error
        return json.loads(self.store.get(key))

    def gather_and_decide(self, topic, value, decide):
        """Everyone gives ``value``; rank 0 calls ``decide`` on the list, and its outcome (or its
        TransportError, as one) is everyone's. An error anywhere reaches every rank: rank 0, whose
        process often serves the store, returns (and may exit) only when all have heard."""
        if self.rank:
            self.say(f"{topic}/{self.rank}", value)
            verdict = self.hear(f"{topic}/verdict", "rank 0")
            self.say(f"{topic}/heard/{self.rank}", True)
        else:
            try:
                values = [value] + [self.hear(f"{topic}/{r}", f"rank {r}") for r in range(1, self.size)]
                verdict = {"ok": decide(values)}
            except TransportError as error:
                verdict = {"error": str(error)}
            self.say(f"{topic}/verdict", verdict)
            self._all_heard(topic)
        if "error" in verdict:
            raise TransportError(verdict["error"])
        return verdict["ok"]

    def _all_heard(self, topic):
        # A rank that is lost here has no claim on the others' verdict: no error, and a short wait.
        with contextlib.suppress(RuntimeError):
            self.store.wait([f"{topic}/heard/{r}" for r in range(1, self.size)],
                            timedelta(seconds=min(10.0, self.left())))


def places(exchange):
    """The Place of every rank of the group, in rank order, on every rank."""
    table = exchange.gather_and_decide("place", asdict(Place.here()), lambda values: values)
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
