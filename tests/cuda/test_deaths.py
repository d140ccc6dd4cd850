"""What a rank that dies, or comes late, leaves to the other ranks on their simulated GPUs, whatever becomes of a dead
process's events."""

import threading
import time

import pytest

from c10d_custom.errors import CustomBackendError
from c10d_custom.transport.cuda import transport as cuda_transport
from device_tensors import device_tensor, options, warm
from fake_driver import FakeDriver
from fake_world import World
from thread_ranks import run_ranks

ORDERS = {order: {"cuda_mode": "shared", "cuda_order": order} for order in ("host", "values", "events")}
each_death = pytest.mark.parametrize("dead_events_pass", [True, False], ids=["dead_passes", "dead_never"])


def idle(r, seconds):
    """Whether all streams of the rank come to their end."""
    until = time.monotonic() + seconds
    while any(s.ops for s in r.world.streams if s.rank == r.rank) and time.monotonic() < until:
        r.world.step()
        time.sleep(1e-3)
    return not any(s.ops for s in r.world.streams if s.rank == r.rank)


@each_death
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [10, 100_000])
def test_what_a_dead_rank_has_not_put_does_not_count(order, dead_events_pass, count, monkeypatch):
    """Its process is gone after its host has agreed, and before its stream has put anything. Nothing tells the others
    of the death (it seems to have left in order): what came of the call must."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 1.0)
    world = World(7, dead_events_pass=dead_events_pass)

    def body(r):
        warm(r)
        t = device_tensor(r, count, 1.0)
        if r.rank == 1:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=lambda: world.drivers[1].dead)
        work = r.pg.allreduce([t], options(True, 1.5))
        if r.rank == 1:
            time.sleep(0.5)
            r.cpu.__dict__["abort"] = lambda: None  # a process that is gone tells nobody
            world.kill(1)
            r.cpu.cpu.leave()
            r.cpu.cpu.set_mark(1)
            r.pg._closed = True
            return
        until = time.monotonic() + 5
        with pytest.raises(CustomBackendError):
            work.wait()
            while not work.is_completed():
                assert time.monotonic() < until, "neither done nor failed"
                time.sleep(1e-3)
        assert idle(r, 5.0)
        with pytest.raises(CustomBackendError):
            r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False, 1.0))

    run_ranks(3, body, config=ORDERS[order], world=world, clean=False, may_race=order == "values")
    assert not world.leaks(but={1}), world.leaks(but={1})


def test_a_death_that_is_known_makes_what_was_let_go_void():
    """Streams that were let go run on with garbage: so may those of a call that is enqueued only then."""
    world = World(3)

    def body(r):
        warm(r)
        t = device_tensor(r, 10, 1.0)
        if r.rank == 1:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=lambda: r.cpu.broken())
        works = [r.pg.allreduce([t], options(True, 20.0)) for _ in range(2)]
        for work in works:
            work.wait()
        if r.rank == 1:
            r.cpu.cpu.abort()
        until = time.monotonic() + 5
        for work in works:
            with pytest.raises(CustomBackendError):
                while not work.is_completed():
                    assert time.monotonic() < until, "neither done nor failed"
                    time.sleep(1e-3)

    run_ranks(2, body, config=ORDERS["values"], world=world, clean=False, may_race=True)


def test_a_late_ranks_values_do_not_undo_the_release():
    """It writes less over what has let the others go, and then nothing more."""
    first, late, never = threading.Event(), threading.Event(), threading.Event()
    both = threading.Barrier(2)

    def body(r):
        warm(r)
        t = device_tensor(r, 10, 1.0)

        def held(gate):
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)

        held(late if r.rank else first)
        r.pg.allreduce([t], options(True, 0.4)).wait()
        if r.rank:
            held(never)
        r.pg.allreduce([t], options(True, 0.4)).wait()
        until = time.monotonic() + 10
        while not r.cpu.broken() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)  # both have been let go
        both.wait(20)
        if r.rank:
            late.set()
            for _ in range(300):
                r.world.step()
        both.wait(20)
        first.set()
        assert r.rank or idle(r, 5.0)
        both.wait(20)
        never.set()

    run_ranks(2, body, config=ORDERS["values"], clean=False, may_race=True)


def test_values_are_awaited_in_memory_of_ones_own():
    """Which a dead process cannot take along; and what lets go is written by a stream that nothing holds up."""
    waits, writes, all_have = [], [], threading.Barrier(3)
    world = World(1)

    class Watched(FakeDriver):
        def wait_value(self, stream, address, value):
            waits.append((self.rank, stream, self.maps[max(m for m in self.maps if m <= address)][0].owner))
            super().wait_value(stream, address, value)

        def write_value(self, stream, address, value):
            writes.append((self.rank, stream, value))
            super().write_value(stream, address, value)

    def body(r):
        warm(r)
        r.pg.allreduce([device_tensor(r, 100_000, 1.0)], options(False))
        all_have.wait(30)
        r.pg.abort()

    drivers = [Watched(world, r) for r in range(3)]
    run_ranks(3, body, config=ORDERS["values"], world=world, drivers=drivers, may_race=True)
    assert waits and all(rank == owner for rank, _, owner in waits)
    urgent = {s.number for s in world.streams if s.urgent}
    assert {stream for _, stream, value in writes if value > 1 << 20} <= urgent
    assert not urgent & {stream for _, stream, _ in waits}
