"""The driver of one process on the GPUs of fake_world.py.

Rules of the real driver that are held here: an address is good only in the process that has it mapped; what a
process exports it cannot open itself; memory and events that others have opened are not freed; a wait for an
event takes the record that was last at the time, and passes if there was none (a violation: nobody means that);
calls are made with the device active; nothing is used after it is freed. And of our own: no stream waits for another
process, but in kernels that end.
"""

import collections
import contextlib
import ctypes
import threading

import torch

from c10d_custom.call import copy_back
from c10d_custom.native import lib
from c10d_custom.transport.cuda.mappings import Mappings
from fake_kernels import FakeKernels
from fake_memory import FakeMemory
from fake_world import BASE, Event, Op, Record, Stream, merge


class FakeDriver(FakeMemory):
    """``gpu``: ranks that say the same share one. ``fails``: {method: exception} to be raised, once per entry.
    ``first``: of a process that has another GPU besides, the FakeDriver of that; then ``rank`` is a number of its
    own."""

    def __init__(self, world, rank, gpu="GPU-0", process=None, first=None):
        self.world, self.rank = world, rank
        self.device = torch.device("cuda", 0 if first is None else first.device.index + 1)
        self.uuid, self.process = gpu, rank if process is None else process
        self.host = rank if first is None else first.host
        if first is not None:
            self.process = first.process
        self.maps = {}  # address -> (Buffer, own)
        self.opened = {}  # handle of a segment -> [address, how often it is open]
        self.identity, self.mappings = rank + 1, Mappings(self)
        self.fails = {}
        self.given = collections.deque()  # events that nobody has
        self.highest = []  # of each stream created, whether its priority is
        self.side_by_side = False
        self.dead = False
        self.lost = False  # every call fails from now on
        self.graph = []  # launches that have been captured
        self.fused = FakeKernels(self)
        self._here = threading.local()
        with world.lock:
            world.drivers.append(self)
            self.default = self._new_stream()

    # --- how it is called

    @contextlib.contextmanager
    def activate(self):
        depth = getattr(self._here, "depth", 0)
        self._here.depth = depth + 1
        try:
            yield
        finally:
            self._here.depth = depth

    @property
    def is_capturing(self):
        """Of the calling thread's current stream."""
        return getattr(self._here, "capturing", False)

    @is_capturing.setter
    def is_capturing(self, value):
        self._here.capturing = value

    def replay(self):
        """Enqueues what was captured on the current stream."""
        for launch in self.graph:
            self.fused.enqueue(self.current_stream(), *launch)

    def _called(self, name):
        if self.is_capturing:
            self.world.wrong(f"{name} of rank {self.rank} spoils a capture")
        if not getattr(self._here, "depth", 0):
            self.world.wrong(f"{name} of rank {self.rank} with another device active")
        if self.dead:
            raise RuntimeError("this process is gone")
        if self.lost:
            raise RuntimeError("CUDA_ERROR_MPS_CLIENT_TERMINATED")
        if name in self.fails:
            raise self.fails.pop(name)
        self.world.pace()

    def _span(self, address, nbytes, what):
        """(real address, its Buffer or None)"""
        if address < BASE or address >= BASE + (1 << 40):
            segment = self._segment(address, nbytes, what)
            return (address, None) if segment is None else (segment.real + address - segment.base, segment)
        for base, (buffer, _) in self.maps.items():
            if base <= address and address + nbytes <= base + buffer.nbytes:
                return buffer.real + address - base, buffer
        self.world.wrong(f"{what} of rank {self.rank} uses an address that is not mapped there")
        raise RuntimeError(f"illegal address {address:#x} in {what}")

    def _enqueue(self, stream, op):
        with self.world.lock:
            if op.kernel is not None:
                op.kernel.stream = stream
            op.host = dict(self.world.hosts.setdefault(self.host, {}))
            self._stream(stream).ops.append(op)
        self.world.pace()

    def _stream(self, number):
        stream = self.world.streams[number - 1]
        if number != self.default and not stream.created:
            self.world.wrong(f"rank {self.rank} uses a stream that is destroyed")
        if stream.rank != self.rank:
            self.world.wrong(f"rank {self.rank} uses a stream of rank {stream.rank}")
        return stream

    def now(self):
        return self.world.clock

    def visible(self):
        return self.world.visible

    # --- streams and events

    def _new_stream(self):
        with self.world.lock:
            stream = Stream(len(self.world.streams) + 1, self.rank, self.world.random.choice([1, 1, 0.02, 20]))
            self.world.streams.append(stream)
            return stream.number

    def create_stream(self, highest=False):
        self._called("create_stream")
        self.highest.append(highest)
        number = self._new_stream()
        stream = self.world.streams[number - 1]
        stream.created = True
        return number

    def destroy_stream(self, stream):
        with self.world.lock:
            self._called("destroy_stream")
            found = self._stream(stream)
            if not found.created or found.ops:
                self.world.wrong(f"rank {self.rank} destroys a stream twice, or one that is at work")
            found.created = False

    def current_stream(self):
        return getattr(self._here, "stream", self.default)

    @contextlib.contextmanager
    def on(self, stream):
        """torch.cuda.stream, for the calling thread."""
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def capturing(self):
        return self.is_capturing

    def milliseconds(self, start, end):
        with self.world.lock:
            self._called("milliseconds")
            records = [self._event(event, "milliseconds").latest for event in (start, end)]
            if not all(record and record.done for record in records):
                self.world.wrong(f"rank {self.rank} times what is not over")
            return 1e3 * (records[1].at - records[0].at)

    def take_event(self, timed=False):
        with contextlib.suppress(IndexError):  # none are free: the driver is called
            number = self.given.popleft()
            self.world.events[number].destroyed = False
            return number
        with self.world.lock:
            self._called("take_event")
            number = next(self.world.numbers)
            self.world.events[number] = Event(self.rank)
            return number

    def give_event(self, event, timed=False):
        found = self.world.events[event]
        if found.destroyed or found.owner != self.rank:
            self.world.wrong(f"rank {self.rank} gives an event back twice, or another's")
        found.destroyed = True
        self.given.append(event)

    def _event(self, event, what):
        found = self.world.events[event]
        if self.world.drivers[found.owner].process != self.process:  # events serve all GPUs of a process
            self.world.wrong(f"rank {self.rank} uses an event of rank {found.owner}")
        if found.destroyed:
            self.world.wrong(f"{what} of rank {self.rank} uses an event that is given back")
        return found

    def record(self, event, stream):
        with self.world.lock:
            self._called("record")
            found = self._event(event, "record")
            record = found.latest = Record()

            def run(clock):
                record.done, record.clock, record.at = True, dict(clock), self.world.clock

            self._enqueue(stream, Op("record", run=run))

    def wait(self, stream, event):
        with self.world.lock:
            self._called("wait")
            record = self._event(event, "wait").latest
            if record is None:
                self.world.wrong(f"rank {self.rank} waits for an event that was never recorded")
                return
            self._enqueue(stream, Op("wait", ready=lambda: record.done, waits=lambda: record.clock))

    def done(self, event):
        with self.world.lock:
            self._called("done")
            record = self._event(event, "done").latest
            if record is None:
                return True
            for _ in range(self.world.random.choice([1, 4, 16])):  # polls are many: they would take most of the time
                if record.done or not self.world.step():
                    break
            if record.done:
                merge(self.world.hosts.setdefault(self.host, {}), record.clock)
            return record.done

    # --- work

    def copy(self, stream, target, source, nbytes):
        with self.world.lock:
            self._called("copy")
            to, there = self._span(target, nbytes, "copy")
            at, here = self._span(source, nbytes, "copy")
            self._enqueue(
                stream,
                Op(
                    "copy",
                    run=lambda clock: ctypes.memmove(to, at, nbytes),
                    reads=[(at, nbytes)],
                    writes=[(to, nbytes)],
                    buffers=[b for b in (there, here) if b],
                ),
            )

    def copy_in(self, stream, target, source, nbytes):
        self.copy(stream, target, source, nbytes)

    def zero(self, stream, address, nbytes):
        with self.world.lock:
            self._called("zero")
            at, buffer = self._span(address, nbytes, "zero")
            self._enqueue(
                stream,
                Op("zero", run=lambda clock: ctypes.memset(at, 0, nbytes), writes=[(at, nbytes)], buffers=[buffer]),
            )

    @property
    def kernels(self):
        return self.fused

    def reduce(self, stream, dtype, redop, factors, jobs):
        with self.world.lock:
            self._called("reduce")
            reads, writes, buffers, work = [], [], [], []
            for sources, targets, count in jobs:
                nbytes = count * dtype.item_bytes
                spans = [self._span(a, nbytes, "reduce") for a in [*sources, *targets] if nbytes]
                reals, n = [real for real, _ in spans], len(sources)
                reads += [(a, nbytes) for a in reals[:n]]
                writes += [(a, nbytes) for a in reals[n:]]
                buffers += [b for _, b in spans if b]
                work.append((reals[:n], reals[n:], count))
            for i, low in enumerate(writes):
                if any(low[0] < h[0] + h[1] and h[0] < low[0] + low[1] for h in writes[:i]):
                    self.world.wrong(f"a kernel of rank {self.rank} writes the same memory twice")

            def run(clock):
                for sources, targets, count in work:
                    result = ctypes.create_string_buffer(count * dtype.item_bytes)
                    n = len(sources)
                    status = n and lib.c10d_reduce(
                        dtype.code,
                        redop,
                        result,
                        (ctypes.c_void_p * n)(*sources),
                        n,
                        count,
                        (ctypes.c_double * len(factors))(*factors) if factors else None,
                    )
                    if status:
                        self.world.wrong(f"a reduction of {dtype.name} with {redop}, which there is not")
                    for target in targets:
                        ctypes.memmove(target, result, count * dtype.item_bytes)

            self._enqueue(stream, Op("reduce", run=run, reads=reads, writes=writes, buffers=buffers))

    def copy_tensors(self, stream, pairs):
        self._called("copy_tensors")
        for pair in pairs:
            self.user(stream, lambda pair=pair: copy_back([pair]), reads=[pair[1]], writes=[pair[0]])

    def future(self, devices):
        assert self.device in devices
        return torch.futures.Future()

    @contextlib.contextmanager
    def after(self, events):
        self._called("after")
        for event in events:
            self._event(event, "after")
        yield

    # --- for tests

    def user(self, stream, run, reads=(), writes=(), ready=None):
        """A kernel of the user's on tensors, which are CPU tensors here."""

        def spans(tensors):
            return [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]

        self._enqueue(
            stream, Op("user", ready=ready, run=lambda clock: run(), reads=spans(reads), writes=spans(writes))
        )
