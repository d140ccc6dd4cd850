"""all_reduce by the fused kernels among ranks that are late, die, abort or disagree, and on a GPU that fails."""

import contextlib
import threading
import time

import pytest
import torch

from c10d_custom.errors import CollectiveTimeoutError, CustomBackendError, PeerLostError, TransportError
from c10d_custom.transport.cuda import transport as cuda_transport
from c10d_custom.transport.cuda.stream_op import StreamOp
from device_tensors import device_tensor, options, warm
from fake_driver import FakeDriver
from fake_world import World
from fused_ranks import P2P, is_void, run, transport_of
from thread_ranks import run_ranks


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_stream_that_does_not_come_in_time(count):
    gate = threading.Event()

    def body(r):
        warm(r)
        t = device_tensor(r, count, 1.0)
        if r.rank == 1:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        began = time.monotonic()
        work = r.pg.allreduce([t], options(True, 0.5))
        work.wait()
        if r.rank == 1:
            time.sleep(1.2)
            gate.set()
            is_void(r, work, CollectiveTimeoutError, "too late: rank [02] had timed out, waiting for this rank")
            return
        is_void(r, work, CollectiveTimeoutError, "rank 1")
        assert 0.3 < time.monotonic() - began < 3
        return str(transport_of(r)._fused.error())

    texts = run(3, body, clean=False)
    assert any("Timed out on the GPU: the stream of rank 1" in text for text in (texts[0], texts[2]))


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_rank_that_dies_after_it_has_announced_a_call(count, monkeypatch):
    monkeypatch.setattr(cuda_transport, "_DRAIN", 1.0)
    world = World(3)
    drivers = [FakeDriver(world, r, f"GPU-{r}") for r in range(3)]

    def body(r):
        warm(r)
        t = device_tensor(r, count, 1.0)
        if r.rank == 1:

            def gone(call, seconds, real=r.cpu.announce):
                real(call, seconds)
                world.kill(1)
                r.cpu.cpu.abort()  # what the others see, once the process is gone
                r.cpu.cpu.set_mark(1)
                raise SystemExit

            r.cpu.__dict__["announce"] = gone
            with pytest.raises(SystemExit):
                r.pg.allreduce([t], options(False))
            r.pg._closed = True
            return None
        began = time.monotonic()
        try:
            work = r.pg.allreduce([t], options(True, 20.0))
            work.wait()
        except CustomBackendError:
            return time.monotonic() - began
        is_void(r, work)
        return time.monotonic() - began

    times = run_ranks(3, body, config=P2P, world=world, drivers=drivers, clean=False)
    assert all(t is None or t < 3 for t in times), times
    assert not world.leaks(but={1}), world.leaks(but={1})


def test_a_kernel_that_gives_up_while_it_is_asked_is_not_done():
    """It ends as any other: what counts is the record once it has ended."""
    driver, found = FakeDriver(World(), 0), []
    with driver.activate():
        stream_op = StreamOp(driver)
        stream_op.verdict = lambda: found[0] if found else None
        stream_op.finish(driver.default)
        driver.done = lambda event: found.append(PeerLostError("gave up")) is None
        with pytest.raises(PeerLostError, match="gave up"):
            stream_op.completed()


def test_an_abort_ends_the_waiting_of_all():
    gate, all_wait = threading.Event(), threading.Barrier(3)

    def body(r):
        warm(r)
        t = device_tensor(r, 10, 1.0)
        if r.rank == 1:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        work = r.pg.allreduce([t], options(True, 30.0))
        work.wait()
        all_wait.wait(30)
        began = time.monotonic()
        if r.rank == 1:
            r.pg.abort()
            time.sleep(0.5)
            gate.set()
        is_void(r, work)
        return time.monotonic() - began

    assert all(t < 3 for t in run(3, body, clean=False))


def test_a_group_that_was_aborted_is_destroyed_at_once():
    gate, both_wait = threading.Event(), threading.Barrier(2)

    def body(r):
        warm(r)
        if r.rank == 1:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        r.pg.allreduce([device_tensor(r, 10, 1.0)], options(True, 30.0)).wait()
        both_wait.wait(30)
        began = time.monotonic()
        r.pg.abort()
        if r.rank == 1:
            gate.set()
        r.pg.shutdown()
        return time.monotonic() - began

    assert all(t < 3 for t in run(2, body, clean=False))


def test_kernels_that_found_a_mismatch_end_the_group():
    """As of graphs, which no host announces."""

    def body(r):
        warm(r)
        first, second = torch.ones(4), torch.ones(5)
        r.keep += [first, second]
        time.sleep(0.1)  # the guard has seen the call before to its end
        r.driver.is_capturing = True
        r.pg.allreduce([first if r.rank else second], options(False))
        r.driver.is_capturing = False
        r.driver.replay()
        r.synchronize(5.0)
        until = time.monotonic() + 5
        while not r.cpu.broken() and time.monotonic() < until:
            time.sleep(0.01)
        assert r.cpu.broken()
        with pytest.raises(CustomBackendError) as raised:
            r.pg.allreduce([first], options(False))
        return f"{raised.value} {transport_of(r)._fused.error()}"

    assert any("another call" in text for text in run(2, body))


def test_a_gpu_that_fails_at_the_launch():
    def body(r):
        warm(r)
        if r.rank == 1:
            r.driver.fails["launch"] = RuntimeError("cudaErrorSomething")
        with pytest.raises(CustomBackendError) as raised:
            for _ in range(50):
                r.pg.allreduce([device_tensor(r, 100, 1.0)], options(False, 20.0))
                time.sleep(0.01)
        if r.rank == 1:
            assert isinstance(raised.value, TransportError) and "cudaErrorSomething" in str(raised.value)
        r.synchronize(10.0)

    run(3, body, clean=False)


def test_a_driver_call_that_blocks_while_a_rank_dies(monkeypatch):
    """Whatever thread calls the driver: the kernels are let go all the same."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 1.0)
    world, gate, agreed = World(5), threading.Event(), threading.Barrier(2)

    class Blocked(FakeDriver):
        blocks = False

        def _called(self, name):
            if self.blocks:
                gate.wait(30)
            super()._called(name)

    def body(r):
        warm(r)
        t = device_tensor(r, 10, 1.0)
        if r.rank == 1:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=lambda: False)  # it does not come
        r.pg.allreduce([t], options(True, 60.0)).wait()
        r.driver.blocks = r.rank == 0
        agreed.wait(20)
        if r.rank == 1:
            time.sleep(0.2)
            world.kill(1)
            r.cpu.cpu.abort()  # what the others see, once the process is gone
            r.cpu.cpu.set_mark(1)
            r.pg._closed = True
            return
        until = time.monotonic() + 5
        mine = [s for s in world.streams if s.rank == 0]
        while any(s.ops for s in mine) and time.monotonic() < until:
            world.step()
            time.sleep(1e-3)
        held = [s.ops[0].label for s in mine if s.ops]
        gate.set()
        assert not held, held

    drivers = [Blocked(world, r, f"GPU-{r}") for r in range(2)]
    run_ranks(2, body, config=P2P, world=world, drivers=drivers, clean=False)


def test_a_replay_and_an_eager_call_at_once():
    """The replay waits for rank 1's; meanwhile rank 0 calls eagerly, which no stream orders."""
    gate = threading.Event()

    def body(r):
        warm(r)
        t, other = torch.ones(10), device_tensor(r, 10, 1.0)
        r.keep.append(t)
        r.driver.is_capturing = True
        r.pg.allreduce([t], options(False, 30.0))
        r.driver.is_capturing = False
        with r.driver.activate():
            stream = r.driver.create_stream()
            if r.rank == 1:
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        if r.rank == 0:
            with r.driver.on(stream):
                r.driver.replay()
        work = r.pg.allreduce([other], options(True, 20.0))
        with contextlib.suppress(CustomBackendError):  # rank 0's kernels may have met by then
            work.wait()
        if r.rank == 0:
            until = time.monotonic() + 5
            while transport_of(r)._fused.error() is None and time.monotonic() < until:
                r.world.step()
            gate.set()
        is_void(r, work, CustomBackendError, "at once|rank 0 has given up|no more use")
        with r.driver.on(stream):
            r.synchronize(5.0)
        with r.driver.activate():
            r.driver.destroy_stream(stream)
        return str(transport_of(r)._fused.error())

    said = run(2, body, clean=False)
    assert "two calls of this rank ran on the GPU at once" in said[0] and "rank 0 has given up" in said[1], said


def test_the_error_of_kernels_that_were_let_go_names_the_dead_rank():
    all_wait, gate = threading.Barrier(2), threading.Event()

    def body(r):
        warm(r)
        if r.rank == 1:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        work = r.pg.allreduce([device_tensor(r, 10, 1.0)], options(True, 30.0))
        work.wait()
        all_wait.wait(30)
        if r.rank == 0:
            r.cpu.__dict__["gone"] = lambda: {1: "its process has ended"}
            r.cpu.cpu.abort()
            is_void(r, work, match="rank 1: its process has ended")
            gate.set()

    run(2, body, clean=False)
