"""GPUs and processes without a GPU: streams are queues that a seeded scheduler empties as late and in as odd an order
as streams and events permit. What a process asks of them goes through fake_driver.py.

Every piece of work says what memory it reads and writes. Vector clocks (Mattern 1989; one component per stream
and one per rank's host) tell what must have happened before it: by the order of its stream, by events, by
what the host had seen finished when it enqueued it, and by the collectives in which the hosts met.
Two accesses to one byte, one of them a write, that are not so ordered are a race, whether or not this run shows
it. Races and broken rules go into `World.violations`; tests assert that there are none.
"""

import ctypes
import itertools
import random
import threading
from collections import deque

BASE = 1 << 56  # where no process has memory of its own
GAP = 1 << 21
PAGE = 14  # bits of an address within one, of those that accesses are kept by


class Buffer:
    def __init__(self, owner, nbytes, number=0):
        self.owner, self.nbytes, self.number = owner, nbytes, number
        self.bytes = ctypes.create_string_buffer(b"\xee" * nbytes, nbytes)
        self.real = ctypes.addressof(self.bytes)
        self.freed = False
        self.importers = set()


class Segment:
    """Of torch's allocator, at an address of its owner's. ``number``: CUDA's, of no other."""

    def __init__(self, owner, base, nbytes, real, number):
        self.owner, self.base, self.nbytes, self.number = owner, base, nbytes, number
        self.real = base if real is None else real
        self.freed, self.exportable = False, True
        self.importers = set()


class Record:
    def __init__(self):
        self.done, self.clock, self.at = False, {}, 0.0


class Event:
    def __init__(self, owner):
        self.owner, self.latest, self.destroyed = owner, None, False


class Op:
    """``ready()``: may run now; ``run()``: does it; ``reads`` and ``writes``: [(real address, bytes)]."""

    def __init__(self, label, ready=None, run=None, reads=(), writes=(), buffers=(), waits=None):
        self.label, self.ready, self.run = label, ready, run
        self.reads, self.writes, self.buffers, self.waits = list(reads), list(writes), buffers, waits
        self.host = {}
        self.kernel = None  # of fake_kernels, whose half this is


class Stream:
    def __init__(self, number, rank, weight):
        self.number, self.rank, self.weight = number, rank, weight
        self.ops = deque()
        self.clock = {}
        self.created = False  # by `create_stream`, and not yet destroyed


class World:
    """All GPUs and processes. ``laziness``: how likely a call of the driver lets nothing run; ``mapped``: whether CUDA
    numbers allocations, so that memory can be mapped again."""

    def __init__(self, seed=0, laziness=None):
        self.mapped = False
        self.visible = 1  # GPUs that a process sees
        self.flags_lost = False  # what a kernel writes in another GPU's memory, kernels there do not see
        self.shares_context = False  # MPS: a client's death is the end of all who share its GPU
        self.clock = 0.0  # seconds that copies have taken, one after the other
        self.rates = {"link": 1e12, "host": 1e10}  # bytes a second
        self.separate = False  # MIG: GPUs do not open each other's memory
        self.lock = threading.RLock()
        self.stepping = False
        self.rendezvous = {}  # number of ranks -> threading.Barrier, of tests
        self.random = random.Random(seed)
        self.laziness = self.random.choice([0.0, 0.5, 0.9, 1.0]) if laziness is None else laziness
        self.violations = []
        self.streams = []
        self.buffers = {}  # handle -> Buffer
        self.segments = {}  # base -> Segment
        self.moved = 0  # bytes that copies and kernels of the transport have read and written
        self.events = {}  # number -> Event, as opened anywhere
        self.pinned = {}  # address -> (rank, buffer)
        self.accesses = {}  # number of a page -> [(start, end, write, component, tick, label)], all within it
        self.hosts = {}  # rank -> clock
        self.meetings = {}
        self.mail = {}  # messages between hosts that are on their way: clocks of their senders
        self.signals = {}  # of fused kernels: (real address of a pad, number of the call) -> what its rank said
        self.op = Op
        self.numbers = itertools.count(1)
        self.addresses = itertools.count(BASE, GAP)
        self.drivers = []
        self.keep = []  # so that no address serves twice, nor a late access harms

    def wrong(self, text):
        self.violations.append(text)

    # --- time

    def step(self):
        """Runs one piece of work, if any can. None amid another: what is collected calls the driver too."""
        with self.lock:
            if self.stepping:
                return False
            self.stepping = True
            try:
                return self._step()
            finally:
                self.stepping = False

    def _step(self):
        heads = [s for s in self.streams if s.ops and (s.ops[0].ready is None or s.ops[0].ready())]
        if not heads:
            return False
        stream = self.random.choices(heads, [s.weight for s in heads])[0]
        op = stream.ops.popleft()
        clock = stream.clock
        merge(clock, op.host)
        if op.waits is not None:
            merge(clock, op.waits())
        tick = clock[stream.number] = clock.get(stream.number, 0) + 1
        if any(b.freed for b in op.buffers):
            self.wrong(f"{op.label} of rank {stream.rank} uses memory that is freed")
            return True
        for span in op.reads:
            self._access(span, False, stream.number, tick, clock, f"{op.label} of rank {stream.rank}")
        for span in op.writes:
            self._access(span, True, stream.number, tick, clock, f"{op.label} of rank {stream.rank}")
        if op.label in ("copy", "reduce"):
            self.moved += sum(nbytes for _, nbytes in op.reads + op.writes)
            host = any(self.is_pinned(address) for address, _ in op.reads + op.writes)
            self.clock += op.writes[0][1] / self.rates["host" if host else "link"] if op.writes else 0
        if op.run is not None:
            op.run(clock)
        return True

    def _access(self, span, write, component, tick, clock, label):
        low, high = span[0], span[0] + span[1]
        for page in range(low >> PAGE, high + (1 << PAGE) - 1 >> PAGE):
            start, end = max(low, page << PAGE), min(high, page + 1 << PAGE)
            kept = []
            for other in self.accesses.get(page, ()):
                ostart, oend, owrite, ocomponent, otick, olabel = other
                if ostart < end and start < oend:
                    if clock.get(ocomponent, 0) < otick:
                        if write or owrite:
                            self.wrong(
                                f"race: {label} {'writes' if write else 'reads'} what {olabel} "
                                f"{'writes' if owrite else 'reads'}"
                            )
                    elif (write or not owrite) and start <= ostart and oend <= end:
                        continue  # what conflicts with it conflicts with this one, which comes later
                kept.append(other)
            kept.append((start, end, write, component, tick, label))
            self.accesses[page] = kept

    def host_access(self, rank, reads, writes, label):
        """The CPU's, in the thread of a rank."""
        with self.lock:
            clock = self.hosts.setdefault(rank, {})
            component = f"host {rank}"
            tick = clock[component] = clock.get(component, 0) + 1
            for spans, write in ((reads, False), (writes, True)):
                for span in spans:
                    self._access(span, write, component, tick, clock, f"{label} of rank {rank}'s CPU")

    def forget(self, low, nbytes):
        """Memory goes back to where it came from."""
        with self.lock:
            end = low + nbytes
            for page in range(low >> PAGE, end + (1 << PAGE) - 1 >> PAGE):
                where = self.accesses.get(page, ())
                self.accesses[page] = [a for a in where if a[1] <= low or end <= a[0]]

    def is_pinned(self, address):
        with self.lock:
            return any(a <= address < a + buffer.nbytes for a, (_, buffer) in self.pinned.items())

    def pace(self):
        with self.lock:
            if self.random.random() >= self.laziness:
                for _ in range(self.random.choice([1, 1, 2, 5])):
                    self.step()

    def settle(self):
        """Runs all that can run: torch.cuda.synchronize on every device."""
        while self.step():
            pass

    # --- hosts

    def barrier(self, size, seconds=60.0):
        """Of the threads of a test alone: orders nothing that the GPUs do."""
        with self.lock:
            found = self.rendezvous.setdefault(size, threading.Barrier(size))
        found.wait(seconds)

    def enter(self, key, rank):
        with self.lock:
            self.meetings.setdefault(key, {})[rank] = dict(self.hosts.setdefault(rank, {}))

    def met(self, key, rank):
        with self.lock:
            for clock in self.meetings[key].values():
                merge(self.hosts[rank], clock)

    def post(self, key, rank):
        """The host of a rank sends a message."""
        with self.lock:
            self.mail.setdefault(key, deque()).append(dict(self.hosts.setdefault(rank, {})))

    def read(self, key, rank):
        with self.lock:
            if mail := self.mail.get(key):  # else of a CPU tensor, by the fast path
                merge(self.hosts.setdefault(rank, {}), mail.popleft())

    def kill(self, rank):
        """The process of a rank is gone, and what it had queued never runs: neither data nor values are there."""
        with self.lock:
            for stream in self.streams:
                if stream.rank == rank:
                    stream.ops.clear()
            for buffer in self.buffers.values():
                buffer.importers.discard(rank)
            for segment in self.segments.values():
                segment.importers.discard(rank)
                if segment.owner == rank:  # what others still see of it nobody says
                    ctypes.memset(segment.real, 0xDD, segment.nbytes)
            self.drivers[rank].dead = True
            for driver in self.drivers if self.shares_context else ():
                if driver.uuid == self.drivers[rank].uuid and driver.rank != rank:
                    driver.lost = True
                    for stream in self.streams:
                        if stream.rank == driver.rank:
                            stream.ops.clear()

    def leaks(self, but=()):
        """What is left that belongs to ranks other than ``but``."""
        with self.lock:
            left = [
                f"rank {b.owner}: {b.nbytes} bytes" for b in self.buffers.values() if not b.freed and b.owner not in but
            ]
            left += [
                f"rank {e.owner}: event {n}" for n, e in self.events.items() if not e.destroyed and e.owner not in but
            ]
            left += [f"rank {s.rank}: a stream" for s in self.streams if s.created and s.rank not in but]
            left += [f"rank {rank}: pinned memory" for rank, _ in self.pinned.values() if rank not in but]
            left += [
                f"rank {d.rank}: an opened address"
                for d in self.drivers
                if d.rank not in but and any(not own for _, own in d.maps.values())
            ]
            return left


def merge(clock, other):
    for component, tick in other.items():
        if clock.get(component, 0) < tick:
            clock[component] = tick
