"""A simulator of all_reduce over many hosts, flat and hierarchical, and of a DDP step on top of it.

Words. A *host* holds *ranks* that share its memory and its *wire*, the full-duplex link to the other hosts. A
message of b bytes between hosts takes alpha + b / beta (Hockney, "The communication challenge for MPP", 1994), and
message_cpu of a core, which is LogP's overhead (Culler et al., 1993). Bytes moved by a host's cores are counted as
memcpy's, all ranks together. All hosts are taken to be alike but for their ranks, and to run in step; the slowest
part of any host is everyone's.

Flat: MPI's algorithms as in Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, with MPICH's order of partners (nearest first), ranks numbered host by host; the ring as in Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. They run round by round.

Hierarchical, ours: the message is cut into *chunks*, each of which passes these *stages*: reduce_scatter inside the
host, exchange between the hosts, all_gather inside the host. A host's cores and its wire each serve one chunk at a
time, so that the stages of several chunks overlap; that is simulated as events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

AGREEMENT_BYTES = 64


@dataclass(frozen=True)
class Machine:
    """What a fit finds. Seconds, and bytes per second. The defaults are a guess at hosts with 10 Gbit/s Ethernet."""

    alpha: float = 25e-6  # latency of a message between hosts
    beta: float = 1.25e9  # rate of a host's wire, each way
    message_cpu: float = 1e-6  # a core's work per message
    copy: float = 10e9  # rate at which a host's cores move bytes to and from the wire (inf: RDMA)
    memory: float = 40e9  # rate at which a host's ranks together copy or reduce bytes in its memory
    sync: float = 3e-6  # one synchronisation, or one small message, among ranks of one host
    call: float = 6e-6  # price of a call whatever it does
    shared: bool = False  # the hosts are namespaces of one machine: its cores do the work of all of them


@dataclass(frozen=True)
class Job:
    """Ranks on each host, in rank order."""

    ranks: tuple[int, ...]

    @classmethod
    def even(cls, hosts: int, ranks_per_host: int) -> Job:
        return cls((ranks_per_host,) * hosts)

    @property
    def hosts(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        return sum(self.ranks)


@dataclass(frozen=True)
class Settings:
    """How our algorithm cuts messages."""

    chunk: int = 1 << 20
    small: int = 8 << 10  # up to this many bytes, one exchange of everything
    window: int = 8  # chunks under way at once


@dataclass(frozen=True)
class Stage:
    """``resource`` ("cores", "wire") is busy for ``seconds``; what follows may start ``after`` seconds later.
    ``leaving``: bytes that it sends from its host."""

    resource: str
    seconds: float
    after: float = 0.0
    leaving: float = 0.0


# ------------------------------------------------------------------------------------------- hierarchical


def stages(job: Job, machine: Machine, size: float) -> list[Stage]:
    """The stages of a chunk of ``size`` bytes, on the host with most ranks."""
    hosts, most, cores = job.hosts, max(job.ranks), job.hosts if machine.shared else 1

    def work(moved: float) -> float:  # copies and reductions in memory
        return moved / machine.memory * cores

    def exchange(sent: float, combined: float) -> list[Stage]:
        # The carriers' ranks each send to the same carrier's rank on every other host, at once; the chunk streams, so
        # what arrives leaves the wire alpha after it was sent.
        messages = (hosts - 1) * machine.message_cpu
        return [
            Stage("cores", (messages + sent / machine.copy) * cores),
            Stage("wire", sent / machine.beta, machine.alpha, sent),
            Stage("cores", (messages + sent / machine.copy) * cores + work(combined)),
        ]

    inside = machine.sync if most > 1 else 0
    copied = most * size if most > 1 else 0
    result = [Stage("cores", inside + work(2 * copied))]  # copy in; reduce
    if hosts == 2:
        result += exchange(size, 2 * size)
    elif hosts > 2:
        part = size * (hosts - 1) / hosts
        result += exchange(part, size) + exchange(part, 0)
    return result + [Stage("cores", inside + work(copied))]


def pipeline(chunks: Iterable[list[Stage]], window: int) -> float:
    """When the last of ``chunks``, lists of Stages, has passed all its stages. At most ``window`` are under way; a
    resource takes the chunk that can start first, and of those the eldest."""
    free = dict.fromkeys((s.resource for c in chunks for s in c), 0.0)
    waiting, end = iter(chunks), 0.0
    ready: list[Any] = []  # [when it may start, its stages after this one, this one]
    for chunk in waiting:
        ready.append([0.0, iter(chunk[1:]), chunk[0]])
        if len(ready) == window:
            break
    while ready:
        mine = min(ready, key=lambda r: max(r[0], free[r[2].resource]))  # the first of equals: the eldest
        at, rest, stage = mine
        done = max(at, free[stage.resource]) + stage.seconds
        free[stage.resource] = done
        mine[0], mine[2] = done + stage.after, next(rest, None)
        if mine[2] is None:
            end = max(end, mine[0])
            ready.remove(mine)
            following = next(waiting, None)
            if following is not None:
                ready.append([mine[0], iter(following[1:]), following[0]])
    return end


def _dissemination(job: Job, machine: Machine, nbytes: float, grows: bool) -> float:
    """ceil(log2 hosts) rounds of one message each, of ``nbytes``; where ``grows``, of all that was received so far."""
    seconds, held = 0.0, 1
    while held < job.hosts:
        send = nbytes * (min(held, job.hosts - held) if grows else 1)
        moved = (2 * machine.message_cpu + 2 * send / machine.copy) * (job.hosts if machine.shared else 1)
        seconds += machine.alpha + moved + send / machine.beta
        held *= 2
    return seconds


def _chunks(job: Job, machine: Machine, size: float, settings: Settings) -> list[list[Stage]]:
    whole, rest = divmod(size, settings.chunk)
    return [stages(job, machine, settings.chunk)] * int(whole) + ([stages(job, machine, rest)] if rest else [])


@lru_cache(1 << 14)
def hierarchical(job: Job, machine: Machine, size: float, settings: Settings = Settings()) -> float:
    """Seconds of our all_reduce of ``size`` bytes."""
    inside = machine.sync if max(job.ranks) > 1 else 0
    if size <= settings.small:
        # Each host's sum goes to all hosts, and each adds them in the order of the hosts.
        moved = (max(job.ranks) + job.hosts) * size / machine.memory * (job.hosts if machine.shared else 1)
        return machine.call + 2 * inside + moved + _dissemination(job, machine, size, grows=True)
    return (
        machine.call
        + inside
        + _dissemination(job, machine, AGREEMENT_BYTES, grows=False)
        + pipeline(_chunks(job, machine, size, settings), settings.window)
    )


def bytes_leaving(job: Job, size: float, settings: Settings = Settings()) -> float:
    """Payload that leaves each host in our all_reduce of a large message."""
    return sum(stage.leaving for chunk in _chunks(job, Machine(), size, settings) for stage in chunk)


# --------------------------------------------------------------------------------------------------- flat


@dataclass(frozen=True)
class Round:
    """What the busiest host does while each rank sends at most one message, ``times`` times over."""

    leaving: float  # bytes it sends to other hosts
    inside: float  # bytes its ranks send to each other
    combined: float  # bytes its ranks reduce
    times: int = 1


def _exchange_rounds(job: Job, send: Callable[[int], float], combine: Callable[[int], float]) -> Iterator[Round]:
    """Rounds in which rank r exchanges ``send(k)`` bytes with rank r XOR 2^k and reduces ``combine(k)``, for all k.
    Ranks above the largest power of two hand their data to a neighbour first, and get the result back at the end,
    as in MPICH; the caller adds that. Hosts are taken as blocks of most ranks."""
    most, members = max(job.ranks), 1 << (job.size.bit_length() - 1)
    active = max(1, most * members // job.size)  # of a host's ranks, those that take part
    for k in range(members.bit_length() - 1):
        # A host is a block of active neighbours: a distance of at least that leads out of it.
        crossing = active if 1 << k >= active else 0 if active & (active - 1) == 0 else active / 2
        if job.hosts == 1:
            crossing = 0
        yield Round(crossing * send(k), (active - crossing) * send(k), active * combine(k))


def _folding(job: Job, size: float) -> list[Round]:
    """The two rounds of ranks beyond a power of two: give everything, get the result."""
    beyond = job.size - (1 << (job.size.bit_length() - 1))
    if not beyond:
        return []
    pairs = min(beyond, max(1, max(job.ranks) // 2))
    outside = max(job.ranks) == 1
    return [
        Round(pairs * size * outside, pairs * size * (not outside), pairs * size),
        Round(pairs * size * outside, pairs * size * (not outside), 0),
    ]


def ring_rounds(job: Job, size: float) -> list[Round]:
    """2 (P - 1) rounds of S / P to the next rank: one rank of each host sends to the next host."""
    part, most = size / job.size, max(job.ranks)
    outside = 1 if job.hosts > 1 else 0
    return [
        Round(outside * part, (most - outside) * part, most * part, job.size - 1),
        Round(outside * part, (most - outside) * part, 0, job.size - 1),
    ]


def rabenseifner_rounds(job: Job, size: float) -> list[Round]:
    """reduce_scatter by recursive halving, all_gather by recursive doubling."""
    halving = list(_exchange_rounds(job, lambda k: size / 2 ** (k + 1), lambda k: size / 2 ** (k + 1)))
    return halving + [replace(r, combined=0) for r in reversed(halving)] + _folding(job, size)


def doubling_rounds(job: Job, size: float) -> list[Round]:
    """Recursive doubling: all of it in every round."""
    return list(_exchange_rounds(job, lambda k: size, lambda k: size)) + _folding(job, size)


FLAT = {"ring": ring_rounds, "rabenseifner": rabenseifner_rounds, "doubling": doubling_rounds}


def _round_seconds(r: Round, job: Job, machine: Machine) -> float:
    cores = job.hosts if machine.shared else 1
    # In a message inside a host, bytes are copied in and out. MPI streams a message: wire and copies overlap.
    seconds = (2 * r.inside + r.combined) / machine.memory * cores
    if r.leaving:
        busy = 2 * machine.message_cpu * cores
        return seconds + busy + machine.alpha + max(r.leaving / machine.beta, 2 * r.leaving / machine.copy * cores)
    return seconds + machine.sync


@lru_cache(1 << 14)
def flat(job: Job, machine: Machine, size: float, algorithm: str | None = None) -> float:
    """Seconds of MPI's all_reduce by ``algorithm``; by default the best of them, as a well-tuned library would."""
    if algorithm is None:
        return min(flat(job, machine, size, name) for name in FLAT)
    return machine.call + sum(r.times * _round_seconds(r, job, machine) for r in FLAT[algorithm](job, size))


# ---------------------------------------------------------------------------------------------------- DDP


@dataclass(frozen=True)
class Training:
    """One DDP step. Gradients become ready evenly over the backward pass, last layers first, and are reduced
    bucket by bucket (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020)."""

    parameters: int = 100 << 20  # bytes of gradients
    bucket: int = 25 << 20
    first_bucket: int = 1 << 20  # DDP's first is smaller, so that communication starts early
    forward: float = 0.1
    backward: float = 0.2
    overlap: float = 1.0  # how much of the communication runs beside the backward pass: 1 all, 0 none


def step(all_reduce: Callable[[int], float], training: Training) -> float:
    """Seconds of a step, given ``all_reduce(size)``; forward + backward where there is nothing to reduce."""
    sizes: list[int] = []
    left = training.parameters
    while left:
        sizes.append(min(left, training.bucket if sizes else training.first_bucket))
        left -= sizes[-1]
    produced, done, total = 0, 0.0, 0.0
    for size in sizes:
        produced += size
        seconds = all_reduce(size)
        done = max(done, training.backward * produced / training.parameters) + seconds
        total += seconds
    exposed = max(0.0, done - training.backward)
    return training.forward + training.backward + training.overlap * exposed + (1 - training.overlap) * total


def efficiency(all_reduce: Callable[[int], float], training: Training) -> float:
    """What of the step is computing: the throughput against that of as many ranks that need not talk."""
    return (training.forward + training.backward) / step(all_reduce, training)
