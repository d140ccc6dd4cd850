"""The simulator's start-up: what it takes the ranks of a job to make their first group over several hosts, with MPI
over the store, for jobs that no one has at hand.

Words. An *operation* is one request to the job's one *store*, whose server serves them one at a time. A *topic* is one
round in which all ranks tell rank 0 something and hear what came of it (creation/exchange.py): two operations of each
rank, and *looks*, whether what it waits for is there. A rank that waits looks less and less often, so that looks are
a part of the server's time that does not grow.

In a topic, everything that all ranks ask of the server is taken to queue; between topics, ranks wait for the slowest.
Left out: that ranks begin at different times, and what the network between the hosts and the store takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .model import Job

# Of a rank that is not the first of its host, without looks: two operations for each topic of the job, and of its host.
TOPICS = ("place", "mpi job", "reached", "pmi", "mpi started", "mpi")
OPERATIONS = 2 * (len(TOPICS) + 1)
# What nobody else's number of ranks changes: of the group's first rank, and of the first of another host.
OPERATIONS_OF_RANK_0, OPERATIONS_OF_A_FIRST = 43, 21
HEARD = 2  # the offers of two ports of failure detectors: a look each, at least
# Bytes that the store hands to a rank, for each rank or host of the job.
PLACE, RANK_IN_MPI, INTERFACE, ADDRESS = 15, 6, 14, 1300
# creation/exchange.py's pauses between looks
_FIRST, _FIRST_PER_RANK, _MOST, _MOST_PER_RANK, _GROWTH = 0.2e-3, 3e-6, 10e-3, 0.1e-3, 1.5


@dataclass(frozen=True)
class Machine:
    """Seconds. ``operation``, ``process`` and ``mpi`` as in docs/results/2026-11-25-torchrun-over-hosts.md; the
    others are a guess at hosts with 8 cores and 10 Gbit/s Ethernet."""

    operation: float = 9.5e-6  # the server's, of an operation
    byte: float = 0.8e-9  # of each byte that the server hands out: its own time, or its wire's
    process: float = 0.083  # a core's, of each rank: its own part, mpi4py's import among it
    mpi: float = 0.048  # a core's, of each rank: MPI_Init
    connect: float = 0.2e-3  # the failure detector's, on the first rank: of each other host one, of the next one all
    cores: int = 8  # of a host
    shared: bool = False  # the hosts are namespaces of one machine, which has so many cores


@dataclass(frozen=True)
class StartUp:
    """Seconds: what the ranks' own processes take, MPI in them, the store's server, pauses between looks."""

    processes: float
    mpi: float
    server: float
    pauses: float

    @property
    def total(self) -> float:
        return self.processes + self.mpi + self.server + self.pauses


@dataclass(frozen=True)
class Point:
    """One measured start-up."""

    job: Job
    seconds: float
    mpi_seconds: float


def _looks(seconds: float, size: int) -> tuple[int, float]:
    """(how often a rank looks that waits so long, its last pause)"""
    pause, most, waited, looks = max(_FIRST, _FIRST_PER_RANK * size), max(_MOST, _MOST_PER_RANK * size), 0.0, 1
    while waited < seconds:
        waited += pause
        looks += 1 + (pause == most)  # from then on also whether somebody has given up
        pause = min(_GROWTH * pause, most)
    return looks, pause


def _handed_out(job: Job) -> dict[str, int]:
    """Bytes, to all ranks together, in each topic that has more than a few."""
    size, hosts = job.size, job.hosts
    return {
        "place": size * size * PLACE,
        "reached": size * hosts * INTERFACE,
        "pmi": hosts * hosts * ADDRESS,  # to the first rank of each host
        "mpi": size * size * RANK_IN_MPI,
    }


def bytes_handed_out(job: Job) -> int:
    """By the store, to all ranks together."""
    return sum(_handed_out(job).values())


def _topics(job: Job, machine: Machine) -> Iterator[tuple[float, float]]:
    """(the server's seconds, a pause) of each topic, those inside hosts together as one."""
    handed = _handed_out(job)
    for topic in (*TOPICS, "inside hosts"):
        operations = 2 + (HEARD if topic == "inside hosts" else 0)
        server = job.size * operations * machine.operation + handed.get(topic, 0) * machine.byte
        looks, pause = _looks(server, job.size)
        yield server + job.size * looks * machine.operation, pause


def start_up(job: Job, machine: Machine) -> StartUp:
    """Until the last rank has its group."""
    on_these_cores = job.size if machine.shared else max(job.ranks)
    share = max(1.0, on_these_cores / machine.cores)
    topics = list(_topics(job, machine))
    return StartUp(
        machine.process * share,
        machine.mpi * share,
        sum(server for server, _ in topics) + (job.hosts - 1 + max(job.ranks) - 1) * machine.connect,
        sum(2 * pause for _, pause in topics),  # rank 0's, then everyone's
    )


def read(paths: Iterable[str], machine: Machine) -> tuple[list[Point], Machine]:
    """What tests/mpi/start_up.py --json has written: start-ups, and the machine with the store's figures, and the cores
    that all hosts shared."""
    points = []
    for path in paths:
        with open(path) as f:
            found = json.load(f)
        points += [Point(Job(tuple(run["hosts"])), run["seconds"], run["mpi_seconds"]) for run in found["runs"]]
        machine = replace(machine, operation=found["operation"], byte=found["byte"], cores=found["cores"], shared=True)
    return points, machine


def fit(points: Sequence[Point], machine: Machine) -> Machine:
    """With the ``process`` and ``mpi`` that predict ``points`` best, as relative errors."""

    def factor(measured: Sequence[float], given: Sequence[float], unit: Sequence[float]) -> float:
        """That least squares of ((given + factor * unit) / measured - 1) ask for; 0 at least."""
        rows = list(zip(measured, given, unit, strict=True))
        return max(0.0, sum(u * (m - g) / m**2 for m, g, u in rows) / sum((u / m) ** 2 for m, _, u in rows))

    bare = [start_up(p.job, replace(machine, process=1.0, mpi=0.0)) for p in points]
    share = [b.processes for b in bare]
    mpi = factor([p.mpi_seconds for p in points], [0.0] * len(points), share)
    given = [b.server + b.pauses + mpi * s for b, s in zip(bare, share, strict=True)]
    return replace(machine, mpi=mpi, process=factor([p.seconds for p in points], given, share))


def main(paths: Sequence[str], hosts: Sequence[int], ranks_per_host: int, then: dict[str, Any]) -> int:
    """Prints the fit and its errors, and what is predicted for real hosts, with ``then`` changed."""
    points, machine = read(paths, Machine())
    if points:
        machine = fit(points, machine)
    names = [f.name for f in fields(Machine) if f.name != "shared"]
    print(" ".join(f"{name:>10}" for name in names))
    print(" ".join(f"{getattr(machine, name):>10.3g}" for name in names))
    if points:
        print(f"\n{'ranks on hosts':>20} {'measured s':>11} {'predicted s':>12} {'error':>7}")
    for point in points:
        predicted = start_up(point.job, machine).total
        ranks = "+".join(map(str, point.job.ranks))
        print(f"{ranks:>20} {point.seconds:>11.2f} {predicted:>12.2f} {predicted / point.seconds - 1:>+7.0%}")
    machine = replace(machine, **{"byte": Machine.byte, "cores": Machine.cores, "shared": False, **then})
    print(
        f"\npredicted start-up, {ranks_per_host} ranks and {machine.cores:g} cores per host; operations on the store, "
        f"looks left out: a rank's {OPERATIONS}, each host's first's {OPERATIONS_OF_A_FIRST}, "
        f"rank 0's {OPERATIONS_OF_RANK_0}\n"
        f"{'hosts':>6} {'ranks':>6} {'server s':>9} {'pauses s':>9} {'MPI s':>6} {'in all s':>9} {'handed out MB':>14}"
    )
    for count in hosts:
        job = Job.even(count, ranks_per_host)
        parts = start_up(job, machine)
        print(
            f"{count:>6} {job.size:>6} {parts.server:>9.2f} {parts.pauses:>9.2f} {parts.mpi:>6.2f} {parts.total:>9.2f} "
            f"{bytes_handed_out(job) / 1e6:>14.1f}"
        )
    return 0
