"""Groups whose ranks share a simulated GPU and each other's tensors in place, through everything that may become of
the memory of these. Each function fails by AssertionError; test_in_place_mutations.py breaks the code and runs them
again."""

import gc
import threading
import time
import weakref
from unittest import mock

import torch
from torch.distributed.distributed_c10d import AllgatherOptions

from c10d_custom.errors import CustomBackendError
from c10d_custom.transport.cuda import in_place
from c10d_custom.transport.cuda import transport as cuda_transport
from device_tensors import contents, device_tensor, options, warm
from fake_driver import FakeDriver
from fake_world import World
from test_shared import SHARED, Program
from thread_ranks import run_ranks

LARGE = 5000  # floats: more than cuda_in_place_bytes


def run(size, body, seed=0, config=None, on=True, **more):
    """``on``: the ranks' trial must go well; else a broken line could hide behind the staging memory."""

    def tried(r):
        warm(r)
        assert group_of(r)._collectives.peers.facts.in_place, group_of(r).mode
        return body(r)

    return run_ranks(size, tried if on else body, seed=seed, config={**SHARED, **(config or {})}, in_place=True, **more)


def group_of(r):
    return next(iter(r.pg._transport._cuda.values()))


def opened(r):
    """Allocations of other processes that this rank has open, but for staging memory and the like."""
    return len(r.driver.opened)


def all_reduce(r, tensor, seconds=20.0):
    return r.pg.allreduce([tensor], options(False, seconds))


def summed(r, tensor):
    """The value that all elements of a sum have."""
    all_reduce(r, tensor)
    (value,) = contents(r, tensor).unique().tolist()
    return value


def programs(seed, size=3, config=None, seconds=8.0):
    """Random collectives, checked by bits. How many of them were done in place."""
    done = []

    class Counted(in_place.InPlace):
        def run(self, *arguments):
            done.append(super().run(*arguments))
            return done[-1]

    p = Program.of(seed, size, 10)
    with mock.patch("c10d_custom.transport.cuda.peers.InPlace", Counted):
        run(size, p.run, seed, config, seconds=seconds)
    assert all(done), "some ranks could not"
    return len(done)


def in_order(seed):
    """Every rank's inputs are awaited, every output is free, and nobody goes on before the kernel is done."""

    def body(r):
        warm(r)
        for step in range(4):
            t = device_tensor(r, LARGE, float(step + 1))
            r.read(t, [])
            all_reduce(r, t)
            r.fill(t, torch.full((LARGE,), 9.0))  # over the kernel, if that still runs

    run(3, body, seed, laziness=1.0, seconds=8.0)


def own_segment(r, count, value, freed=None):
    """A tensor whose segment goes back to CUDA once nobody has its storage, as torch's may at any time. ``freed`` gets
    its address then."""
    t = torch.zeros(count)
    r.driver.adopt(t)
    with r.driver.activate():
        r.driver.user(r.driver.current_stream(), lambda: t.fill_(value), writes=[t])
    r.synchronize()

    def goes(base=t.data_ptr()):
        r.driver.torch_frees(base)
        if freed is not None:
            freed.append(base)

    weakref.finalize(t.untyped_storage(), goes)
    return t


def dropped(seed):
    """Tensors whose users are done with them: torch frees none that the leader has open, and gets back those that are
    more than may be kept."""

    def body(r):
        here, freed = group_of(r)._collectives.peers.in_place, []
        here._limit = 3 * LARGE * 4
        for step in range(8):
            t = own_segment(r, LARGE, step + 1.0, freed)
            assert all_reduce(r, t) is not None
            r.synchronize()
            assert t.unique().tolist() == [3.0 * (step + 1)]
            del t
            gc.collect()
            kept = [told.storage is not None for told in here._told.values()]
            assert all(kept) and len(kept) <= (4 if r.rank else 0), kept
            assert r.rank or opened(r) <= 2 * 4, r.driver.opened
        assert len(freed) >= (3 if r.rank else 8), freed
        r.world.barrier(r.size)

    run(3, body, seed, seconds=8.0)


def in_use(seed):
    """Tensors that their users have still, however many bytes: they stay mapped."""

    def body(r):
        here = group_of(r)._collectives.peers.in_place
        here._limit = 2 * LARGE * 4
        tensors = [own_segment(r, LARGE, 1.0) for _ in range(5)]
        for _ in range(3):
            for t in tensors:
                all_reduce(r, t)
        assert len(here._told) == (5 if r.rank else 0)
        r.synchronize()
        r.world.barrier(r.size)

    run(2, body, seed, seconds=8.0)


def for_a_call_alone(seed):
    """What is larger than may be kept, and what all_gather gives: free as soon as the call is over."""

    def body(r):
        here, freed = group_of(r)._collectives.peers.in_place, []
        here._limit = 2 * LARGE * 4
        t = own_segment(r, 3 * LARGE, 1.0, freed)
        all_reduce(r, t)
        assert opened(r) == 0 and not here._told
        del t
        gc.collect()
        assert len(freed) == 1, "it is kept"
        parts, mine = [own_segment(r, LARGE, 0.0, freed) for _ in range(r.size)], own_segment(r, LARGE, r.rank)
        r.pg.allgather([parts], [mine], AllgatherOptions()).wait()
        r.synchronize()
        assert [float(p[0]) for p in parts] == [0.0, 1.0, 2.0]
        assert opened(r) == (0 if r.rank else 2), r.driver.opened
        del parts
        gc.collect()
        assert len(freed) == 1 + r.size, "they are kept"
        r.world.barrier(r.size)

    run(3, body, seed, seconds=8.0)


def views(seed):
    """Tensors amid a segment."""

    def body(r):
        whole = device_tensor(r, 3 * LARGE, 1.0)
        assert summed(r, whole[LARGE : 2 * LARGE]) == 3.0
        assert contents(r, whole).sum() == 5.0 * LARGE

    run(3, body, seed, seconds=8.0)


def freed(seed):
    """Segments that are freed, and others with equal handles in their places; segments that only come. What the leader
    has open then."""

    def body(r):
        t = device_tensor(r, LARGE, 1.0)
        seen, fresh = [summed(r, t)], []
        for step in range(3):
            if r.rank:
                r.driver.free_segment(t.data_ptr())
            r.fill(t, torch.full((LARGE,), float(step)))  # adopts it again
            seen.append(summed(r, t))
        assert len(group_of(r)._collectives.peers.in_place._told) == (1 if r.rank else 0)
        if r.rank == 0:
            assert opened(r) == 2, r.driver.opened
        if r.rank:
            r.driver.free_segment(t.data_ptr())
        for step in range(3):
            fresh.append(device_tensor(r, LARGE, 1.0))
            assert summed(r, fresh[-1]) == 3.0
        if r.rank == 0:
            assert opened(r) == 2 * 3, r.driver.opened
        assert len(group_of(r)._collectives.peers.in_place._told) == (3 if r.rank else 0)
        assert seen == [3.0, 0.0, 3.0, 6.0], seen

    run(3, body, seed, seconds=8.0)


def resized(seed):
    """A tensor whose storage its user has resized to nothing is closed with the next call."""

    def body(r):
        t = device_tensor(r, LARGE, 1.0)
        assert summed(r, t) == 3.0
        r.synchronize()
        r.world.barrier(r.size)
        t.untyped_storage().resize_(0)
        assert summed(r, device_tensor(r, 2 * LARGE, 1.0)) == 3.0
        assert opened(r) == (0 if r.rank else 2), r.driver.opened

    run(3, body, seed, seconds=8.0)


def overlapping(seed):
    """A segment where a longer one was, beginning elsewhere: its handle is another one."""

    def body(r):
        long = device_tensor(r, 3 * LARGE, 1.0)
        assert summed(r, long) == 2.0
        part = long[LARGE : 2 * LARGE]
        if r.rank:
            r.driver.free_segment(long.data_ptr())
            r.driver.segment_at(part.data_ptr(), part.nbytes)
        assert summed(r, part) == 4.0
        if r.rank == 0:
            assert opened(r) == 1, r.driver.opened

    with mock.patch.object(in_place.InPlace, "_freed", lambda self: []):  # it did not get to tell
        run(2, body, seed, seconds=8.0)


def more_than_are_kept(seed):
    """No more segments stay open than may."""

    def body(r):
        r.driver.mappings._most = 5
        tensors = [device_tensor(r, LARGE, 1.0) for _ in range(5)]
        for _ in range(2):
            for t in tensors:
                all_reduce(r, t)
                assert opened(r) <= 5, r.driver.opened
                assert r.rank or opened(r) >= 2
        assert contents(r, tensors[0])[0] == 9.0

    run(3, body, seed, seconds=8.0)


def told_again(seed):
    """What a rank no longer remembers having told, it tells anew."""

    def body(r):
        tensors = [device_tensor(r, LARGE, 1.0) for _ in range(4)]
        for _ in range(2):
            for t in tensors:
                all_reduce(r, t)
                told = group_of(r)._collectives.peers.in_place._told
                assert 1 <= len(told) <= 2 or not r.rank and not told, len(told)
        assert contents(r, tensors[3])[0] == 4.0

    with mock.patch.object(in_place, "_KEPT", 2):
        run(2, body, seed, seconds=8.0)


def exported_once(seed):
    """A handle is asked for once in an allocation's life, and opened once."""

    def body(r):
        t = device_tensor(r, LARGE, 1.0)
        all_reduce(r, t)
        counted = {n: mock.Mock(wraps=getattr(r.driver, n)) for n in ("export_memory", "open_memory")}
        with mock.patch.multiple(r.driver, **counted):
            all_reduce(r, t)
        assert not any(m.called for m in counted.values())
        assert group_of(r)._collectives.peers.facts.in_place, "given up"
        assert contents(r, t)[0] == 4.0

    run(2, body, seed, seconds=8.0)


def cannot_be_exported(seed):
    """On one rank: all take the staging memory, for that call."""

    def body(r):
        t, other = device_tensor(r, LARGE, 1.0), device_tensor(r, LARGE, 1.0)
        assert summed(r, other) == 3.0
        if r.rank == 2:  # which the leader hears even if a rank cannot
            r.driver.free_segment(other.data_ptr())
        segment = r.driver.segment_at(t.data_ptr(), t.nbytes)
        segment.exportable = r.rank != 1
        assert summed(r, t) == 3.0
        assert r.rank or opened(r) == 1
        r.driver.adopt(other)
        assert summed(r, other) == 9.0
        assert r.rank or opened(r) == 2

    run(3, body, seed, seconds=8.0)


def beyond_its_segment(seed):
    """A tensor that no single allocation holds."""

    def body(r):
        t = device_tensor(r, LARGE, 1.0)
        if r.rank == 1:
            r.driver.segment_at(t.data_ptr(), t.nbytes - 4)
            r.driver.segment_at(t.data_ptr() + t.nbytes - 4, 4)
        else:  # the leader's memory may be any
            r.driver.segment_at(t.data_ptr(), t.nbytes).exportable = False
        assert summed(r, t) == 2.0
        assert not r.driver.opened

    run(2, body, seed, seconds=8.0)


def cannot_be_opened(seed):
    """By the leader: all take the staging memory, from then on."""

    def body(r):
        t = device_tensor(r, LARGE, 1.0)
        warm(r)
        if r.rank == 0:
            real, failed = r.driver.open_memory, []

            def second_fails(handle):
                failed.append(handle)
                if len(failed) == 2:
                    raise RuntimeError("out of luck")
                return real(handle)

            r.driver.open_memory = second_fails
        assert [summed(r, t), summed(r, t)] == [3.0, 9.0]
        if r.rank == 0:
            assert len(failed) == 2, "tried again"
            assert not any(o.used() for o in r.driver.mappings._open.values())

    run(3, body, seed, seconds=8.0)


def gone(seed, who, size=3):
    """A rank dies once it has told where its tensors lie. The others fail, soon, and nothing is left."""
    world = World(seed)
    drivers = [FakeDriver(world, r) for r in range(size)]

    def body(r):
        warm(r)
        t = device_tensor(r, LARGE, 1.0)
        if r.rank == who:
            calls, real = [], r.cpu.run

            def told_and_gone(call):
                real(call)
                calls.append(call)
                if "where its tensors lie" in call.name:
                    world.kill(who)
                    r.cpu.cpu.abort()  # what the others see, once the process is gone
                    r.cpu.cpu.set_mark(1)
                    raise SystemExit

            r.cpu.__dict__["run"] = told_and_gone
            try:
                all_reduce(r, t)
            except SystemExit:
                r.pg._closed = True
                return 0.0
            raise AssertionError("it did not come to it")
        began = time.monotonic()
        try:
            all_reduce(r, t)
        except CustomBackendError:
            return time.monotonic() - began
        raise AssertionError("a call went well that lacks a rank")

    with mock.patch.object(cuda_transport, "_DRAIN", 1.0):
        times = run(size, body, world=world, drivers=drivers, clean=False)
    assert max(times) < 5, times
    assert not world.leaks(but={who}), world.leaks(but={who})


def kernel_that_does_not_end(seed):
    """All fail in time; and as the kernel may still write them, ranks keep the tensors, also when their groups are
    closed, until the leader has closed what it has open."""
    gate, closed = threading.Event(), threading.Barrier(2, timeout=20)

    def body(r):
        warm(r)
        t = device_tensor(r, LARGE, 1.0)
        if r.rank == 0:
            real = r.driver.reduce

            def behind_a_gate(stream, *arguments):
                r.driver.user(stream, lambda: None, ready=gate.is_set)
                real(stream, *arguments)

            r.driver.reduce = behind_a_gate
        began = time.monotonic()
        try:
            all_reduce(r, t, 0.6)
        except CustomBackendError:
            assert 0.3 < time.monotonic() - began < 5
        else:
            raise AssertionError("a call went well whose kernel has not ended")
        if r.rank:
            r.pg.shutdown()
            kept = [x.data_ptr() for call in cuda_transport._ABANDONED for x in getattr(call, "outputs", ())]
            assert t.data_ptr() in kept, "the tensor is not kept"
            closed.wait()
            return
        closed.wait()
        assert opened(r) == 1
        gate.set()

    with mock.patch.object(cuda_transport, "_DRAIN", 0.4), mock.patch.object(cuda_transport, "_ABANDONED", []):
        run(2, body, seed, clean=False)


def closed_with_the_group(seed):
    """What is open is closed with the group, once nothing uses it."""

    def body(r):
        t = device_tensor(r, LARGE, 1.0)
        all_reduce(r, t)

    run(3, body, seed, laziness=1.0, seconds=8.0)
