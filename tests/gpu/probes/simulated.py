"""A GPU that several processes share, made of files, threads and waiting: for trying the probes where there is none.

It can be told to be otherwise than one would like (World). It takes no part in speed: its figures mean nothing."""

import contextlib
import ctypes
import itertools
import mmap
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from c10d_custom.doctor.probes.gpu import Gpu
from c10d_custom.transport.cuda.mappings import Allocation

_POLL = 200e-6


@dataclass(frozen=True)
class World:
    """``death``: what a wait for an event of a dead process does: "ends", "never", or "poisons" the waiting process.
    ``queues``: of a process; streams beyond share them. ``wrong``: more that is not as one would like."""

    folder: str
    death: str = "never"
    queues: int = 32
    wrong: frozenset = frozenset()


class SimulatedGpu(Gpu):
    large = 1 << 20
    rounds = 20

    def __init__(self, world):
        self.driver, self._world = Driver(world), world

    def about(self):
        return {"uuid": "simulated", "driver": "1.0", "device": "simulated GPU"}

    def spin(self, stream, seconds, address=0, value=0):
        def begin():
            time.sleep(seconds)
            if address:
                ctypes.c_uint32.from_address(address).value = value
            return True

        self.driver.enqueue(stream, begin)

    def copy_by_kernel(self, stream, target, source, nbytes):
        self.driver.copy(stream, target, source, nbytes)

    def torch_memory(self, nbytes):
        base = self._torch = self.driver.allocate(4 * nbytes)
        if "expandable" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            return base + nbytes, base + nbytes  # which nobody can open
        return base + nbytes, base

    def free_torch_memory(self):
        self.driver.free(self._torch)


class Driver:
    def __init__(self, world):
        self._world, self._numbers, self._files = world, itertools.count(1), {}  # address: (name, mapping)
        self._numbered, self._opened = {}, {}
        self._events, self._poisoned, self._waiting = {}, None, 0
        self._queues = [queue.SimpleQueue() for _ in range(world.queues)]
        for waiting in self._queues:
            threading.Thread(target=self._work, args=(waiting,), daemon=True).start()

    def _work(self, waiting):
        while True:
            begin = waiting.get()
            while not begin():
                time.sleep(_POLL)

    def enqueue(self, stream, begin):
        self._queues[stream % len(self._queues)].put(begin)

    def activate(self):
        return contextlib.nullcontext()

    # --- memory

    def _open(self, name):
        with open(Path(self._world.folder, name), "r+b") as f:
            mapping = mmap.mmap(f.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._files[address] = name, mapping
        return address

    def _make(self, nbytes):
        name = f"{os.getpid()}-{next(self._numbers)}"
        Path(self._world.folder, name).write_bytes(bytes(nbytes))
        return self._open(name)

    def allocate(self, nbytes):
        while "waits hold up others" in self._world.wrong and self._waiting:
            time.sleep(_POLL)
        address = self._make(nbytes)
        self._numbered[address] = nbytes, next(self._numbers)
        return address

    def free(self, address):
        self._numbered.pop(address, None)

    def allocation_of(self, address):
        for base, (nbytes, number) in self._numbered.items():
            if base <= address < base + nbytes:
                return Allocation(base, nbytes, 7 if "numbers come again" in self._world.wrong else number)
        return None

    def close_memory(self, address):
        pass

    def export_memory(self, address):
        if address not in self._files:
            raise RuntimeError("cudaErrorInvalidValue")
        return self._files[address][0].encode()

    def open_memory(self, handle):
        if "memory is not shared" in self._world.wrong:
            return self._make(Path(self._world.folder, handle.decode()).stat().st_size)
        address = self._open(handle.decode())
        if "what was open is opened" in self._world.wrong:
            return self._opened.setdefault(len(self._files[address][1]), address)
        return address

    def allocate_pinned(self, nbytes):
        return self._make(nbytes)

    def copy(self, stream, target, source, nbytes):
        self.enqueue(stream, lambda: ctypes.memmove(target, source, nbytes) or True)

    def zero(self, stream, address, nbytes):
        self.enqueue(stream, lambda: ctypes.memset(address, 0, nbytes) or True)

    # --- streams and events: an event is two words in a file, how often it was recorded and how often that came

    def create_stream(self, urgent=False):
        return next(self._numbers)

    def create_event(self, shared=False):
        event = self._make(64)
        self._events[event] = os.getpid()
        return event

    def destroy_event(self, event):
        pass

    def export_event(self, event):
        return self.export_memory(event)

    def open_event(self, handle):
        event = self._open(handle.decode())
        self._events[event] = int(handle.decode().split("-")[0])
        return event

    def record(self, event, stream):
        counts = (ctypes.c_uint32 * 2).from_address(event)
        counts[0] += 1
        ticket = counts[0]

        def come():
            counts[1] = max(counts[1], ticket)
            return True

        self.enqueue(stream, come)

    def wait(self, stream, event):
        counts, owner = (ctypes.c_uint32 * 2).from_address(event), self._events[event]
        ticket = counts[0]

        def past():
            if counts[1] >= (counts[0] if "waits follow the event" in self._world.wrong else ticket):
                return True
            if self._world.death == "never" or alive(owner):
                return False
            if self._world.death == "poisons":
                self._poisoned = "cudaErrorIllegalAddress"
            return True

        if "events order nothing" not in self._world.wrong:
            self.enqueue(stream, past)

    def done(self, event):
        if self._poisoned:
            raise RuntimeError(self._poisoned)
        counts = (ctypes.c_uint32 * 2).from_address(event)
        return counts[1] >= counts[0]

    def write_value(self, stream, address, value):
        word = ctypes.c_uint32.from_address(address)

        def write():
            word.value = value
            return True

        self.enqueue(stream, write)

    def wait_value(self, stream, address, value):
        if "no stream memory operations" in self._world.wrong:
            raise RuntimeError("cudaErrorNotSupported")
        word, begun = ctypes.c_uint32.from_address(address), []

        def past():
            if not begun:
                begun.append(True)
                self._waiting += 1
            if word.value < value or "waits end never" in self._world.wrong:
                return False
            self._waiting -= 1
            return True

        self.enqueue(stream, past)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
