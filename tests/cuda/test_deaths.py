"""What a rank that dies, or comes late, leaves to the other ranks on their simulated GPUs."""

import time

import pytest

from c10d_custom.errors import CustomBackendError
from c10d_custom.transport.cuda import transport as cuda_transport
from device_tensors import device_tensor, options, warm
from fake_world import World
from thread_ranks import run_ranks


def idle(r, seconds):
    """Whether all streams of the rank come to their end."""
    until = time.monotonic() + seconds
    while any(s.ops for s in r.world.streams if s.rank == r.rank) and time.monotonic() < until:
        r.world.step()
        time.sleep(1e-3)
    return not any(s.ops for s in r.world.streams if s.rank == r.rank)


@pytest.mark.parametrize("count", [10, 100_000])
def test_what_a_dead_rank_has_not_put_does_not_count(count, monkeypatch):
    """Its process is gone after its host has agreed, and before its stream has put anything. Nothing tells the others
    of the death (it seems to have left in order): what came of the call must."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 1.0)
    world = World(7)

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

    run_ranks(3, body, config={"cuda_mode": "shared"}, world=world, clean=False)
    assert not world.leaks(but={1}), world.leaks(but={1})
