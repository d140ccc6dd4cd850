"""all_reduce by the fused kernels in a group of ranks with a GPU each, on simulated GPUs."""
import threading
import time
from datetime import timedelta

import pytest
import torch
from c10d_custom.errors import (AbortedError, CollectiveTimeoutError, CustomBackendError, PeerLostError, TransportError,
                                UsageError)
from c10d_custom.transport.cuda import fused, p2p
from c10d_custom.transport.cuda import transport as cuda_transport
from c10d_custom.transport.cuda.stream_op import Events, StreamOp
from conformance.reference import reduce_in_order
from conformance.values import raw
from fake_driver import FakeDriver, World
from test_device_work import contents, device_tensor, options, warm
from test_shared import program, values
from thread_ranks import run_ranks
from torch.distributed import ReduceOp

P2P = {"cuda_mode": "p2p"}
HALF = 65536 // 2


def gpus(size):
    return [f"GPU-{r}" for r in range(size)]


def run(size, body, config=P2P, **more):
    return run_ranks(size, body, config={**P2P, **config}, gpus=gpus(size), **more)


def transport_of(r):
    return next(iter(r.pg._transport._cuda.values()))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("config", [{}, {"cuda_order": "values"}], ids=["events", "values"])
def test_every_collective_among_fused_ones(size, config, full):
    for seed in range((150 if size < 5 else 50) if full else (2 if size < 5 else 1)):
        program(5000 * size + seed, size, 10, {**P2P, **config}, gpus=gpus(size))


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "PREMUL_SUM"])
def test_same_bits_as_the_reference_and_by_fused_kernels_alone(op, monkeypatch):
    monkeypatch.setattr(p2p, "_ONE_SHOT_BYTES", {})
    monkeypatch.setattr(p2p, "_ONE_SHOT_BYTES_MANY", 4096)
    counts = [1, 1000, 1024 * 4, HALF // 2 - 1, HALF // 2, HALF // 2 + 1, 2 * HALF + 3]

    def body(r):
        algorithms = set()
        for step, count in enumerate(counts):
            inputs = [values(torch.bfloat16, q, step, count) for q in range(3)]
            t = torch.empty(count, dtype=torch.bfloat16)
            r.fill(t, inputs[r.rank])
            o = options(step % 2)
            o.reduceOp = (torch.distributed._make_nccl_premul_sum(0.5 + r.rank) if op == "PREMUL_SUM"
                          else getattr(ReduceOp, op))
            before, agreed = len(r.driver.fused.launched), r.cpu.calls
            r.pg.allreduce([t], o).wait()
            want = reduce_in_order(inputs, op, [0.5, 1.5, 2.5])
            assert torch.equal(raw(contents(r, t)), raw(want)), count
            assert r.cpu.calls == agreed + 1 or step == 0
            assert len(r.driver.fused.launched) - before == max(1, -(-count * 2 // HALF))
            algorithms |= {key[0] for key in r.driver.fused.launched}
        assert algorithms == {"OneShot", "TwoShot"}
        return transport_of(r).mode.name

    assert run(3, body) == ["p2p"] * 3


def test_views_and_nothing_at_all():
    def body(r):
        wide = torch.zeros(40, 6)
        r.fill(wide, torch.full((40, 6), float(r.rank + 1)))
        column = wide[:, 2]
        r.keep.append(column)
        r.synchronize()
        r.pg.allreduce([column], options(True)).wait()
        r.pg.allreduce([device_tensor(r, 0, 1.0)], options(False))
        want = torch.full((40, 6), float(r.rank + 1))
        want[:, 2] = 3.0
        assert torch.equal(contents(r, wide), want)

    run(2, body)


@pytest.mark.parametrize("size, mode", [(1, "shared"), (2, "p2p"), (16, "p2p"), (17, "p2p")])
def test_ranks_that_the_kernels_do_not_take_go_as_before(size, mode):
    def body(r):
        t = device_tensor(r, 10, 1.0)
        r.pg.allreduce([t], options(False))
        assert contents(r, t)[0] == float(size)
        return transport_of(r).mode.name, len(r.driver.fused.launched)

    assert set(run(size, body, config={"cuda_mode": "auto"})) == {(mode, 1 if 2 <= size <= 16 else 0)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_host_does_not_wait_and_the_result_is_awaited(asynchronous):
    def body(r):
        warm(r)
        t, gate = torch.ones(100), threading.Event()
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: t.fill_(2.0), writes=[t], ready=gate.is_set)
        work = r.pg.allreduce([t], options(asynchronous))
        work.wait()
        assert float(t[0]) == 1.0 and (not asynchronous or not work.is_completed())
        gate.set()
        assert contents(r, t)[0] == 4.0
        return work.wait(timedelta(seconds=10)) and work.is_completed() and work.get_future().wait()[0] is t

    assert run(2, body) == [True, True]


# --- memory

@pytest.mark.parametrize("step", ["zero", "open_memory", "allocate", "allocate_pinned", "export_memory"])
def test_what_one_rank_cannot_do_makes_all_fall_back(step):
    def body(r):
        if r.rank == 1:
            real, calls = getattr(r.driver, step), []
            which = {"zero": 1, "open_memory": 4, "allocate": 2, "allocate_pinned": 2, "export_memory": 2}[step]

            def fails(*arguments):
                calls.append(arguments)
                if len(calls) == which:
                    raise RuntimeError("out of luck")
                return real(*arguments)

            setattr(r.driver, step, fails)
        t = device_tensor(r, 5000, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), transport_of(r).mode

    results = run(3, body)
    assert [v for v, _ in results] == [3.0] * 3
    assert all(m.name == "staged" and "rank 1" in m.reason and "out of luck" in m.reason for _, m in results)


def test_staging_is_as_configured_or_16_mib():
    assert fused.Fused(None, 0, 2, 65536)._staging == 65536
    assert fused.Fused(None, 0, 2, 64 << 20)._staging == 16 << 20


def test_a_group_is_destroyed_with_work_under_way():
    def body(r):
        warm(r)
        t = device_tensor(r, 20_000, 1.0)
        for _ in range(3):
            r.pg.allreduce([t], options(False))
        if r.rank == 1:       # the others have left, and their guards are still there
            time.sleep(0.2)
        return t

    for seed in range(5):
        assert [float(t[0]) for t in run(3, body, seed=seed, laziness=1.0)] == [27.0] * 3


def test_a_rank_that_has_left_does_not_end_the_others_calls():
    gate = threading.Event()

    def body(r):
        warm(r)
        t = device_tensor(r, 10, 1.0)
        if r.rank == 0:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        work = r.pg.allreduce([t], options(True))
        work.wait()
        if r.rank == 0:
            time.sleep(0.5)    # rank 1 is leaving: it has nothing more to do
            gate.set()
            return contents(r, t)[0].item()
        return t

    results = run(2, body)
    assert results[0] == float(results[1][0]) == 2.0


# --- failures

def is_void(r, work, kinds=PeerLostError, match="void"):
    r.synchronize(5.0)        # nothing waits for ever
    with pytest.raises(kinds, match=match):
        work.is_completed()
    with pytest.raises(kinds, match=match):
        work.wait()
    until = time.monotonic() + 5
    while not r.cpu.broken() and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(CustomBackendError):
        r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False, 5.0))


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
            is_void(r, work)
            return
        is_void(r, work, (CollectiveTimeoutError, PeerLostError), "rank [012]")
        assert 0.3 < time.monotonic() - began < 3
        return str(transport_of(r).kernels_error())

    texts = run(3, body, clean=False)
    assert any("Timed out on the GPU: the stream of rank 1" in text for text in (texts[0], texts[2]))


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_rank_that_dies_after_it_has_agreed(count, monkeypatch):
    monkeypatch.setattr(cuda_transport, "_DRAIN", 1.0)
    world = World(3)
    drivers = [FakeDriver(world, r, f"GPU-{r}") for r in range(3)]

    def body(r):
        warm(r)
        t = device_tensor(r, count, 1.0)
        if r.rank == 1:
            def gone(call, seconds, real=r.cpu.agree):
                real(call, seconds)
                world.kill(1)
                r.cpu.cpu.abort()      # what the others see, once the process is gone
                r.cpu.cpu.set_mark(1)
                raise SystemExit

            r.cpu.__dict__["agree"] = gone
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
        stream_op = StreamOp(driver, Events(driver))
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
    """Which only graphs can bring about: eager calls are compared before."""
    def body(r):
        warm(r)
        first, second = torch.ones(4), torch.ones(5)
        r.keep += [first, second]
        time.sleep(0.1)       # the guard has seen the call before to its end
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
        return f"{raised.value} {transport_of(r).kernels_error()}"

    assert any("another call" in text for text in run(2, body))


# --- CUDA graphs

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
            for _ in range(turn):      # the kernels' halves are taken in turns all the same
                r.pg.allreduce([other], options(False))
            assert contents(r, other)[0] == 3.0 ** turn
        return [s.unique().tolist() for s in seen]

    for seed in range(4):
        assert run(3, body, seed=seed) == [[[3.0], [9.0], [27.0]]] * 3


def test_a_capture_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr(p2p, "_ONE_SHOT_BYTES", {2: 1024})

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
        refused(r, "CUDA graph.*p2p", lambda: r.pg.broadcast([small]))
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
        with r.driver.activate():     # the group's streams are there, its mode is not
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
        began = time.monotonic()
        r.driver.replay()
        r.synchronize(5.0)
        with pytest.raises(CustomBackendError):
            r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False, 5.0))
        return time.monotonic() - began

    times = run_ranks(3, body, config=P2P, world=world, drivers=drivers, clean=False)
    assert all(t is None or t < 3 for t in times), times


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
