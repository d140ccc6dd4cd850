"""CUDA graphs of all_reduce by the fused kernels: what is captured runs at each replay, or is refused."""

import ctypes
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

from c10d_custom.errors import AbortedError, CustomBackendError, PeerLostError, UsageError
from c10d_custom.transport.cuda import algorithm
from c10d_custom.transport.cuda import transport as cuda_transport
from device_tensors import contents, device_tensor, options, warm
from fake_driver import FakeDriver
from fake_world import World
from fused_ranks import P2P, run, transport_of
from thread_ranks import run_ranks

pytestmark = pytest.mark.lane2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_captured_all_reduce_runs_at_each_replay(asynchronous):
    def body(r):
        warm(r)
        t = torch.ones(1000)
        r.keep.append(t)
        before = r.cpu.calls
        r.driver.is_capturing = True
        work = r.pg.allreduce([t], options(asynchronous))
        assert work.wait() and work.wait(timedelta(seconds=1)) and work.is_completed()
        assert work.get_future().wait()[0] is t
        r.driver.is_capturing = False
        assert r.cpu.calls == before and len(r.driver.graph) == 1 and float(t[0]) == 1.0
        seen = []
        for turn in range(3):
            r.driver.replay()
            r.read(t, seen)
            other = device_tensor(r, 5000, 1.0)
            r.synchronize()
            for _ in range(turn):  # the kernels' halves are taken in turns all the same
                r.pg.allreduce([other], options(False))
            assert contents(r, other)[0] == 3.0**turn
        return [s.unique().tolist() for s in seen]

    for seed in range(4):
        assert run(3, body, seed=seed) == [[[3.0], [9.0], [27.0]]] * 3


def test_a_capture_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr(algorithm, "FLAGGED_BYTES", 1024)

    def refused(r, match, call):
        r.driver.is_capturing = True
        try:
            with pytest.raises(UsageError, match=match):
                call()
        finally:
            r.driver.is_capturing = False

    def body(r):
        small, large = torch.ones(10), torch.ones(1000)
        r.keep += [small, large]
        warm(r)
        refused(r, "not compiled", lambda: r.pg.allreduce([small.double()], options(False)))
        o = options(False)
        o.reduceOp = ReduceOp.MAX
        refused(r, "not compiled", lambda: r.pg.allreduce([small], o))
        refused(r, "not compiled", lambda: r.pg.allreduce([large], options(True)))
        refused(r, "not compiled", lambda: r.pg.broadcast([small]))
        refused(r, "CUDA graph.*p2p", lambda: r.pg.reduce([small]))
        refused(r, "CUDA graph.*p2p", lambda: r.pg.barrier())
        t = device_tensor(r, 10, 1.0)
        r.pg.allreduce([t], options(False))
        assert not r.driver.graph
        return contents(r, t)[0].item()

    assert run(2, body) == [2.0, 2.0]


def test_a_capture_before_the_mode_is_chosen_is_refused():
    def body(r):
        t = torch.ones(10)
        r.keep.append(t)
        with r.driver.activate():  # the group's streams are there, its mode is not
            r.pg._transport._open(torch.device("cuda", 0))
        r.driver.is_capturing = True
        with pytest.raises(UsageError, match="not yet chosen"):
            r.pg.allreduce([t], options(False))
        r.driver.is_capturing = False
        warm(r)

    run(2, body)


def test_a_replay_that_waits_for_a_rank_that_dies_ends(monkeypatch):
    monkeypatch.setattr(cuda_transport, "_DRAIN", 1.0)
    world = World(3)
    drivers = [FakeDriver(world, r, f"GPU-{r}") for r in range(3)]

    def body(r):
        warm(r)
        t = torch.ones(10)
        r.keep.append(t)
        r.driver.is_capturing = True
        r.pg.allreduce([t], options(False, 60.0))
        r.driver.is_capturing = False
        if r.rank == 1:
            time.sleep(0.3)
            world.kill(1)
            r.cpu.cpu.abort()
            r.cpu.cpu.set_mark(1)
            r.pg._closed = True
            return None
        r.cpu.__dict__["gone"] = lambda: {1: "has died"}
        began = time.monotonic()
        r.driver.replay()
        r.synchronize(5.0)
        took = time.monotonic() - began
        with pytest.raises(CustomBackendError):
            r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False, 5.0))
        end = transport_of(r)._fused.p2p
        told = [ctypes.c_uint64.from_address(end._record + 8).value >> rank & 1 for rank in range(3)]
        assert told == [0, 1, 0], "the kernels do not know whose memory may be gone"
        return took

    times = run_ranks(3, body, config=P2P, world=world, drivers=drivers, clean=False)
    assert all(t is None or t < 3 for t in times), times


@pytest.mark.parametrize("late", [False, True])
def test_a_group_s_end_waits_for_replays_on_the_current_stream(late, monkeypatch):
    """They use its memory. Where they do not end, that is kept."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 0.5)
    gate = threading.Event()

    def body(r):
        warm(r)
        t = torch.ones(1000)
        r.keep.append(t)
        r.driver.is_capturing = True
        r.pg.allreduce([t], options(False))
        r.driver.is_capturing = False
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        r.driver.replay()
        if not late:
            threading.Timer(0.1, gate.set).start()
        r.pg.shutdown()
        if late:
            gate.set()
            r.synchronize()
        return float(t[0])

    found = run(2, body, laziness=1.0, clean=not late)
    assert late or found == [2.0, 2.0]


@pytest.mark.parametrize("late", [False, True])
def test_a_group_s_end_waits_for_a_replay_that_has_begun_on_any_stream(late, monkeypatch):
    """Rank 0's waits for rank 1's, to which that one's stream comes late. What does not end in time is ended."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 0.5)
    gate = threading.Event()

    def body(r):
        warm(r)
        t = torch.ones(1000)
        r.keep.append(t)
        r.driver.is_capturing = True
        r.pg.allreduce([t], options(False))
        r.driver.is_capturing = False
        with r.driver.activate():
            stream = r.driver.create_stream()
            with r.driver.on(stream):
                if r.rank:
                    r.driver.user(stream, lambda: None, ready=gate.is_set)
                r.driver.replay()
        r.world.settle()
        r.world.barrier(2)
        if r.rank == 0:
            if not late:
                threading.Timer(0.1, gate.set).start()
            r.pg.shutdown()
            gate.set()
        else:
            assert gate.wait(20)
            r.world.settle()
            r.pg.shutdown()
        with r.driver.activate():
            r.driver.destroy_stream(stream)
        return float(t[0])

    found = run(2, body, laziness=1.0, clean=not late)
    assert late or found == [2.0, 2.0]


def test_a_capture_after_a_failure_is_refused():
    def body(r):
        warm(r)
        t = torch.ones(10)
        r.keep.append(t)
        r.pg.abort()
        r.driver.is_capturing = True
        with pytest.raises((PeerLostError, AbortedError)):
            r.pg.allreduce([t], options(False))
        r.driver.is_capturing = False
        assert not r.driver.graph

    run(2, body, clean=False)
