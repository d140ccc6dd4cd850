"""Ranks that go, stay away or hang while a group communicates CUDA tensors, on a simulated GPU."""

import threading
import time

import pytest

from c10d_custom.errors import AbortedError, CollectiveTimeoutError, CustomBackendError, PeerLostError, TransportError
from c10d_custom.transport.cuda import transport as cuda_transport
from device_tensors import device_tensor, options, warm
from fake_driver import FakeDriver
from fake_world import World
from thread_ranks import run_ranks

MODES = {
    "shared": {"cuda_mode": "shared"},
    "staged": {"cuda_mode": "staged"},
    "by size": {"cuda_mode": "shared", "cuda_host_bytes": 4096},
}
each_mode = pytest.mark.parametrize("config", MODES.values(), ids=list(MODES))


@each_mode
def test_a_rank_that_stays_away_is_named_in_time(config):
    def body(r):
        warm(r)
        if r.rank == 1:
            return None
        began = time.monotonic()
        with pytest.raises((CollectiveTimeoutError, PeerLostError), match="rank 1"):
            r.pg.allreduce([device_tensor(r, 50_000, 1.0)], options(False, 0.5))
        r.synchronize()  # no stream waits for it
        return time.monotonic() - began

    assert all(t is None or t < 3 for t in run_ranks(3, body, config=config))


@each_mode
@pytest.mark.parametrize("count", [10, 100_000])
def test_a_rank_that_goes_in_the_middle_leaves_no_stream_waiting(config, count, monkeypatch):
    """Rank 1's process is gone as soon as it has agreed to the call (staged: has sent its part)."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 1.0)
    world = World(3)
    drivers = [FakeDriver(world, r) for r in range(3)]

    def body(r):
        warm(r)
        t = device_tensor(r, count, 1.0)
        if r.rank == 1:

            def gone(call, seconds, real=r.cpu.agree):
                real(call, seconds)
                world.kill(1)
                r.cpu.cpu.leave()
                r.cpu.cpu.set_mark(1)  # the kernel takes it for gone only when the process is
                raise SystemExit

            r.cpu.__dict__["agree"] = gone
            r.cpu.__dict__["run"] = lambda call: gone(call, call.timeout) if call.memory else r.cpu.cpu.run(call)
            with pytest.raises(SystemExit):
                r.pg.allreduce([t], options(False))
            r.pg._closed = True
            return None
        began, outcome = time.monotonic(), None
        try:
            r.pg.allreduce([t], options(False, 20.0))
            r.pg.allreduce([device_tensor(r, count, 1.0)], options(False, 20.0))
        except CustomBackendError as error:
            outcome = error
        assert isinstance(outcome, (PeerLostError, AbortedError)), outcome
        r.synchronize(10.0)
        return time.monotonic() - began

    times = run_ranks(3, body, config=config, world=world, drivers=drivers, clean=False)
    assert all(t is None or t < 5 for t in times), times
    assert not world.leaks(but={1}), world.leaks(but={1})


@each_mode
def test_a_kernel_that_never_ends_does_not_hang_the_hosts(config):
    gate, both = threading.Event(), threading.Barrier(2)

    def body(r):
        warm(r)
        t = device_tensor(r, 100, 1.0)
        if r.rank == 0:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        both.wait(30)
        began = time.monotonic()
        with pytest.raises(CustomBackendError) as raised:
            r.pg.allreduce([t], options(False, 5.0 if r.rank else 0.5))
        if r.rank == 0:
            assert isinstance(raised.value, CollectiveTimeoutError) and "cuda:0 has not finished" in str(raised.value)
        taken = time.monotonic() - began
        both.wait(30)  # the kernel ends once neither waits for it
        gate.set()
        return taken

    assert all(t < 5 for t in run_ranks(2, body, config=config))


@each_mode
def test_an_error_of_the_gpu_reaches_every_rank(config):
    def body(r):
        warm(r)
        if r.rank == 1:
            r.driver.fails["copy"] = RuntimeError("cudaErrorSomething")
        with pytest.raises(CustomBackendError) as raised:
            for _ in range(3):
                r.pg.allreduce([device_tensor(r, 100, 1.0)], options(False, 20.0))
        if r.rank == 1:
            assert isinstance(raised.value, TransportError) and "cudaErrorSomething" in str(raised.value)
        r.synchronize(10.0)

    run_ranks(3, body, config=config)


@each_mode
def test_an_abort_ends_what_is_under_way(config):
    def body(r):
        warm(r)
        if r.rank == 1:
            time.sleep(0.3)
            r.pg.abort()
            return
        work = r.pg.allreduce([device_tensor(r, 100, 1.0)], options(True))
        with pytest.raises(AbortedError):
            work.wait()
        with pytest.raises(RuntimeError, match="AbortedError"):
            work.get_future().wait()

    # An error that a future has raised lives on in the frames that its traceback names.
    run_ranks(2, body, config=config, clean=False)


@each_mode
def test_a_group_is_destroyed_with_work_under_way(config):
    def body(r):
        warm(r)
        t = device_tensor(r, 20_000, 1.0)
        for _ in range(3):
            r.pg.allreduce([t], options(False))
        return t

    for seed in range(5):
        results = run_ranks(3, body, seed=seed, laziness=1.0, config=config)
        assert [float(t[0]) for t in results] == [27.0] * 3


def test_set_up_survives_a_rank_that_goes(monkeypatch):
    monkeypatch.setattr(cuda_transport, "_DRAIN", 0.5)
    world = World(1)
    drivers = [FakeDriver(world, r) for r in range(3)]

    def body(r):
        if r.rank == 1:
            real, calls = r.cpu.run, []

            def run(call):
                calls.append(call)
                if len(calls) == 4:  # after the addresses were told
                    world.kill(1)
                    r.cpu.cpu.leave()
                    r.cpu.cpu.set_mark(1)
                    raise SystemExit
                real(call)

            r.cpu.__dict__["run"] = run
            with pytest.raises(SystemExit):
                r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False))
            r.pg._closed = True
            return
        with pytest.raises((PeerLostError, AbortedError)):
            r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False))

    run_ranks(3, body, config={"cuda_mode": "shared"}, world=world, drivers=drivers, clean=False)
    assert not world.leaks(but={1}), world.leaks(but={1})
