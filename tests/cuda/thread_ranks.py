"""Ranks as threads of this process: real groups over real shared memory, with a simulated GPU under them. CPU
tensors stand in for those of a GPU, except within `cpu_tensors`."""

import contextlib
import gc
import threading
import time
from datetime import timedelta
from unittest import mock

import torch
from torch.distributed import HashStore, PrefixStore

from c10d_custom import lowering
from c10d_custom.c10d import issuing
from c10d_custom.c10d.issuing import NewGroup
from c10d_custom.c10d.process_group import CustomProcessGroup
from c10d_custom.call import Region
from c10d_custom.config import Config
from c10d_custom.creation.exchange import Exchange
from c10d_custom.creation.local_datagrams import letters_of
from c10d_custom.transport.by_device import ByDevice
from c10d_custom.transport.cuda import driver as cuda_driver
from c10d_custom.transport.cuda.stream_op import poll
from c10d_custom.transport.shm import ShmTransport
from fake_driver import FakeDriver
from fake_world import World

SMALL = {
    "spin_us": 0,
    "cuda_staging_bytes": 65536,
    "cuda_one_shot_bytes": 256,
    "cuda_in_place_bytes": 4096,
    "cuda_host_bytes": 0,
}


class _Here(threading.local):
    two = False  # of all threads: whether a rank has two GPUs


_here = _Here()


@contextlib.contextmanager
def cpu_tensors():
    """What the calling thread communicates in here are CPU tensors after all."""
    before = getattr(_here, "cpu", False)
    _here.cpu = True
    try:
        yield
    finally:
        _here.cpu = before


def _device_of(tensor):
    """Of a rank that has two GPUs, tensors are where their attribute ``gpu`` says, else those of doubles on the second:
    so DDP's buckets, which are of one dtype, are of one GPU each, too."""
    if getattr(_here, "cpu", False) or hasattr(tensor, "on_cpu"):
        return None
    return torch.device("cuda", getattr(tensor, "gpu", int(tensor.dtype == torch.float64 and _here.two)))


@contextlib.contextmanager
def standing_in(driver_of, two=False):
    """Tensors count as those of cuda:0, or of cuda:1 where there are ``two``, with the driver that
    ``driver_of(device)`` gives."""
    _Here.two = two
    profiler_enabled = issuing.profiler_enabled

    def not_fast():  # no call goes the fast path while a profiler runs
        return not getattr(_here, "cpu", False) or profiler_enabled()

    def kept(function):
        # The stand-ins' memory is not freed in the order of a stream, as that of CUDA tensors is.
        def wrapped(*arguments):
            t = function(*arguments)
            if t is not arguments[0] and hasattr(_here, "drivers"):
                driver = _here.drivers[_device_of(t).index]
                driver.world.keep.append(t)
                driver.adopt(t)
            return t

        return wrapped

    with (
        mock.patch.object(lowering, "device_of", _device_of),
        mock.patch.object(lowering, "source", kept(lowering.source)),
        mock.patch.object(lowering, "target", kept(lowering.target)),
        mock.patch.object(issuing, "profiler_enabled", not_fast),
        mock.patch.object(cuda_driver, "driver_of", driver_of),
    ):
        yield


class Met:
    """The CPU transport, telling the World when hosts meet and what memory the CPU touches."""

    def __init__(self, cpu, world, key):
        self.__dict__.update(cpu=cpu, world=world, key=key, calls=0, letters=[])

    def __getattr__(self, name):
        return getattr(self.cpu, name)

    def __setattr__(self, name, value):
        if name == "name":
            self.cpu.name = value
        else:
            self.__dict__[name] = value

    def _meeting(self, function, *arguments):
        self.calls += 1
        key = self.key, self.calls
        self.world.enter(key, self.cpu.rank)
        result = function(*arguments)
        self.world.met(key, self.cpu.rank)
        return result

    def _touch(self, call):
        self.world.keep += [*call.inputs, *call.outputs]
        spans = [[(t.data_ptr(), t.nbytes) for t in tensors] for tensors in (call.inputs, call.outputs)]
        self.world.host_access(self.cpu.rank, *spans, call.name)

    def run(self, call):
        self._touch(call)
        try:
            self._meeting(self.cpu.run, call)
        finally:
            # What ranks tell each other lies in memory that is freed now; no meeting orders its next owner after this.
            for t in (*call.inputs, *call.outputs):
                if isinstance(t, Region) and not self.world.is_pinned(t.data_ptr()):
                    self.world.forget(t.data_ptr(), t.nbytes)

    def agree(self, call, seconds):
        return self._meeting(self.cpu.agree, call, seconds)

    def meet(self, call, number, seconds):
        return self._meeting(self.cpu.meet, call, number, seconds)

    def post(self, message):
        t = message.tensor
        if not isinstance(t, Region) or self.world.is_pinned(t.data_ptr()):
            spans = [(t.data_ptr(), t.nbytes)]
            self.world.host_access(
                self.cpu.rank, [] if message.is_recv else spans, spans if message.is_recv else [], message.name
            )
        if message.is_recv:
            return Letter(self.cpu.post(message), self, message.tag)
        self.world.post((self.key, self.cpu.rank, message.peer, message.tag), self.cpu.rank)
        return self.cpu.post(message)


class Letter:
    """The ticket of a receive: once its host has seen that it is done, what it does next comes after the sending."""

    def __init__(self, ticket, met, tag):
        self._ticket, self._met, self._tag = ticket, met, tag
        with met.world.lock:
            met.letters.append(self)

    def __getattr__(self, name):
        return getattr(self._ticket, name)

    def done(self):
        if not self._ticket.done():
            return False
        met = self._met
        with met.world.lock:  # or another thread of this rank would go on before the clocks are merged
            # With those posted before it: messages are read in the order of their sending.
            before = met.letters[: met.letters.index(self) + 1] if self in met.letters else []
            for letter in before:
                letter.read_if_done()
        return True

    def read_if_done(self):
        if self._ticket.done():
            self._met.letters.remove(self)
            if self._ticket.error() is None:
                me = self._met.cpu.rank
                self._met.world.read((self._met.key, self._ticket.source, me, self._tag), me)


class Rank:
    """What a test's body gets: ``pg``, ``driver`` (that of its first GPU), ``rank``, ``size``."""

    def __init__(self, pg, drivers, cpu, rank, size, world):
        self.pg, self.drivers, self.cpu, self.rank, self.size, self.world = pg, drivers, cpu, rank, size, world
        self.driver, self.keep = drivers[0], world.keep

    def _driver_of(self, tensor):
        return self.drivers[_device_of(tensor).index]

    def fill(self, tensor, values, stream=None):
        """Queues a kernel that writes ``values`` into ``tensor``."""
        self.keep += [tensor, values]
        driver = self._driver_of(tensor)
        driver.adopt(tensor)
        with driver.activate():
            driver.user(
                driver.current_stream() if stream is None else stream, lambda: tensor.copy_(values), writes=[tensor]
            )

    def synchronize(self, seconds=120.0):
        """torch.cuda.current_stream().synchronize(), on all of its GPUs"""
        for driver in self.drivers:
            with driver.activate():
                event = driver.take_event()
                driver.record(event, driver.current_stream())
                until = time.monotonic() + seconds
                assert poll(lambda d=driver, e=event: d.done(e), until, lambda: False), "the GPU hangs"
                driver.give_event(event)

    def read(self, tensor, into, stream=None):
        """Queues a kernel that keeps what ``tensor`` then is in the list ``into``."""
        self.keep.append(tensor)
        driver = self._driver_of(tensor)
        with driver.activate():
            driver.user(
                driver.current_stream() if stream is None else stream,
                lambda: into.append(tensor.clone()),
                reads=[tensor],
            )


def run_ranks(
    size,
    body,
    seed=0,
    laziness=None,
    config=None,
    gpus=None,
    seconds=60.0,
    world=None,
    drivers=None,
    clean=True,
    may_race=False,
    in_place=False,
    second_gpus=None,
):
    """``body(Rank)`` on every rank. Its results in rank order, or its first error; and then that no rule was
    broken and, if ``clean``, nothing is left. ``second_gpus``: of each rank, its second GPU; ``may_race``: of
    results that are known to be void; ``in_place``: memory of torch's allocator can be mapped."""
    world = world or World(seed, laziness)
    world.mapped = in_place
    drivers = drivers or [FakeDriver(world, r, gpus[r] if gpus else "GPU-0") for r in range(size)]
    more = [FakeDriver(world, size + r, g, first=drivers[r]) for r, g in enumerate(second_gpus or ())]
    store, results, errors = HashStore(), [None] * size, [None] * size
    made = []
    options = Config(**{**SMALL, **(config or {})})

    def one(rank):
        try:
            _here.drivers = [drivers[rank], *more[rank : rank + 1]]
            with letters_of(Exchange(PrefixStore("x", store), rank, size, 30.0)) as letters:
                cpu = Met(ShmTransport(letters, options, "test", list(range(size))), world, id(store))
            transport = ByDevice(cpu, options, one_host=True)
            pg = CustomProcessGroup(transport, store, NewGroup(store, rank, size, timedelta(seconds=seconds), "test"))
            made.append(pg)
            results[rank] = body(Rank(pg, _here.drivers, cpu, rank, size, world))
            pg.shutdown()
        except BaseException as error:  # the main thread raises it
            errors[rank] = error

    with standing_in(lambda device: _here.drivers[device.index], bool(more)):
        threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(seconds + 15)
        stuck = [r for r, t in enumerate(threads) if t.is_alive()]
        for pg in made:
            if any(errors):
                pg.abort()
    pg = None
    for rank, error in enumerate(errors):
        if error is not None:
            raise AssertionError(f"rank {rank} (violations: {world.violations})") from error
    assert not stuck, f"ranks {stuck} hang"
    world.settle()
    issuing._live.difference_update(made)
    made.clear()
    gc.collect()  # a Work that nobody waits for gives its events back when it goes
    broken = [v for v in world.violations if not may_race or not v.startswith("race")]
    assert not broken, broken
    if clean:
        assert not world.leaks(), world.leaks()
    return results
