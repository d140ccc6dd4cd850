"""Works, futures, streams and messages of a group's CUDA tensors, on a simulated GPU."""
import logging
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
from c10d_custom.lowering import collectives
from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError, TransportError, UsageError
from c10d_custom.transport.cuda.peers import choose
from thread_ranks import cpu_tensors, run_ranks
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions, BarrierOptions

MODES = ["shared", "staged"]


def options(asynchronous, seconds=None):
    o = AllreduceOptions()
    o.asyncOp = asynchronous
    if seconds:
        o.timeout = timedelta(seconds=seconds)
    return o


def device_tensor(r, count, value, dtype=torch.float32):
    t = torch.zeros(count, dtype=dtype)
    r.fill(t, torch.full((count,), value, dtype=dtype))
    return t


def contents(r, tensor):
    got = []
    r.read(tensor, got)
    r.synchronize()
    return got[0]


def warm(r):
    """The group has chosen its mode."""
    r.pg.allreduce([device_tensor(r, 1, 0.0)], options(False))
    r.synchronize()


@pytest.mark.parametrize("mode", MODES)
def test_wait_lets_the_stream_wait_and_not_the_host(mode):
    def body(r):
        warm(r)
        t = torch.zeros(100)
        gate = threading.Event()
        with r.driver.activate():  # a kernel of the user's that takes its time
            r.driver.user(r.driver.current_stream(), lambda: t.fill_(1.0), writes=[t], ready=gate.is_set)
        work = r.pg.allreduce([t], options(True))
        if mode == "shared":
            work.wait()     # returns although nothing has run
            assert not work.is_completed() and float(t[0]) == 0.0
            gate.set()
        else:
            assert not work.is_completed()
            gate.set()
            work.wait()
        got = contents(r, t)
        assert work.is_completed() and work.is_success() and work.exception() is None
        return got[0].item()

    assert run_ranks(2, body, config={"cuda_mode": mode}) == [2.0, 2.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_wait_with_a_timeout_holds_the_host(mode):
    def body(r):
        warm(r)
        t, gate = device_tensor(r, 10, 1.0), threading.Event()
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        work = r.pg.allreduce([t], options(True))
        with pytest.raises(CollectiveTimeoutError, match="0.2 s"):
            work.wait(timedelta(seconds=0.2))
        gate.set()
        work.wait(timedelta(seconds=20))
        assert work.is_completed()
        return contents(r, t)[0].item()

    assert run_ranks(2, body, config={"cuda_mode": mode}) == [2.0, 2.0]


@pytest.mark.parametrize("mode", MODES)
def test_futures_give_the_tensors_and_callbacks_may_communicate(mode):
    def body(r):
        first, second = device_tensor(r, 500, 1.0), device_tensor(r, 10, 3.0)

        def then(future):
            r.pg.allreduce([second], options(True)).wait()
            return future.value()[0]

        work = r.pg.allreduce([first], options(True))
        assert work.get_future().then(then).wait() is first
        done = r.pg.allreduce([first], options(False)).get_future()
        assert done.wait()[0] is first
        work.wait()
        return contents(r, first)[0].item()

    assert run_ranks(3, body, config={"cuda_mode": mode}) == [9.0] * 3


@pytest.mark.parametrize("mode", MODES)
def test_tensors_live_until_the_gpu_is_done_though_nobody_waits(mode):
    def body(r):
        warm(r)
        t = torch.ones(100)
        gone = weakref.ref(t)
        gate = threading.Event()
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        r.pg.allreduce([t], options(True))
        del t
        assert gone() is not None
        gate.set()
        until = time.monotonic() + 20
        while gone() is not None and time.monotonic() < until:
            r.pg.allreduce([device_tensor(r, 1, 0.0)], options(True)).wait()  # new Works let go of old ones
            r.synchronize()
        assert gone() is None

    run_ranks(2, body, config={"cuda_mode": mode})


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_contiguous_comes_back_in_place(mode):
    def body(r):
        wide = torch.zeros(40, 6)
        r.fill(wide, torch.full((40, 6), float(r.rank + 1)))
        column = wide[:, 2]
        r.keep.append(column)
        # The plain copies are torch's, made at once on this simulated GPU: let it catch up first.
        r.synchronize()
        r.pg.allreduce([column], options(True)).wait()
        got = contents(r, wide)
        want = torch.full((40, 6), float(r.rank + 1))
        want[:, 2] = 3.0
        assert torch.equal(got, want)

    run_ranks(2, body, config={"cuda_mode": mode})


@pytest.mark.parametrize("mode", MODES)
def test_cpu_and_cuda_tensors_in_one_order(mode):
    def body(r):
        device, host = device_tensor(r, 3000, 1.0), torch.ones(3000)
        works = []
        for _ in range(5):
            works.append(r.pg.allreduce([device], options(True)))
            with cpu_tensors():
                works.append(r.pg.allreduce([host], options(True)))
                r.pg.allreduce([host], options(False))     # the quick way
        for w in works:
            w.wait()
        return contents(r, device)[0].item(), host[0].item()

    assert run_ranks(2, body, config={"cuda_mode": mode}) == [(2.0 ** 5, 2.0 ** 10)] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_barrier_is_one_for_the_gpu_too(mode):
    ran = []

    def body(r):
        warm(r)
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: ran.append(r.rank))
        o = BarrierOptions()
        o.asyncOp = False
        r.pg.barrier(o)
        return sorted(ran)

    assert run_ranks(3, body, laziness=1.0, config={"cuda_mode": mode}) == [[0, 1, 2]] * 3


def test_ranks_that_name_different_devices_are_told():
    def body(r):
        with pytest.raises(CollectiveMismatchError) as raised:
            if r.rank:
                r.pg.allreduce([device_tensor(r, 4, 1.0)], options(False))
            else:
                with cpu_tensors():
                    r.pg.allreduce([torch.ones(4)], options(False))
        return str(raised.value)

    for text in run_ranks(2, body):
        assert "device" in text and "float32[4] on CUDA" in text and "rank 0: all_reduce #1 SUM float32[4]\n" in text


def test_tensors_of_one_call_are_on_one_device(monkeypatch):
    places = {}
    monkeypatch.setattr(collectives, "device_of", lambda t: places.get(id(t)))
    lower = collectives.Lowering(0, 2)
    here, there = torch.zeros(4), torch.zeros(2)
    places[id(here)] = torch.device("cuda", 0)
    for lowering in (lambda: lower.all_gather_single(here, there, 1.0), lambda: lower.all_gather([there, here], there, 1.0),
                     lambda: lower.reduce_scatter_single(there, here, ReduceOp.SUM, 1.0),
                     lambda: lower.all_to_all_single(here, here.clone(), [], [], 1.0)):
        with pytest.raises(UsageError, match="is on"):
            lowering()


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_is_refused(mode):
    def body(r):
        warm(r)
        r.driver.is_capturing = True
        with pytest.raises(UsageError, match=f"CUDA graph.*{mode}"):
            r.pg.allreduce([device_tensor(r, 4, 1.0)], options(False))
        r.driver.is_capturing = False
        t = device_tensor(r, 4, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item()

    assert run_ranks(2, body, config={"cuda_mode": mode}) == [2.0, 2.0]


# --- messages

def both_ways(seed, size, steps, config, seconds=60.0):
    """Two ranks send large messages before either receives."""
    def body(r):
        other, n = 1 - r.rank, 300_000
        out = [device_tensor(r, n, 10.0 * r.rank + tag) for tag in range(3)]
        into = [torch.zeros(n) for _ in range(3)]
        r.keep += into
        sends = [r.pg.send([t], other, tag) for tag, t in enumerate(out)]
        receives = [r.pg.recv([into[tag]], other, tag) for tag in (2, 0, 1)]
        for w in receives + sends:
            w.wait()
        assert [float(contents(r, t).unique()) for t in into] == [10.0 * other + tag for tag in range(3)]
        assert [w.source_rank() for w in receives] == [other] * 3

    run_ranks(2, body, seed=seed, config=config, seconds=seconds)


def in_turns(seed, size, steps, config, seconds=60.0):
    """Message after message of one size, none of which the GPU has seen when the next is posted."""
    def body(r):
        into = [torch.zeros(5000) for _ in range(6)]
        r.keep += into
        for k, t in enumerate(into):
            send = r.pg.send([device_tensor(r, 5000, 10.0 * r.rank + k)], 1 - r.rank)
            r.pg.recv([t], 1 - r.rank).wait()
            send.wait()
        assert [float(contents(r, t).unique()) for t in into] == [10.0 * (1 - r.rank) + k for k in range(6)]

    run_ranks(2, body, seed=seed, laziness=1.0, config=config, seconds=seconds)


def test_messages_in_turns():
    for seed in range(5):
        in_turns(seed, 2, 1, {"cuda_mode": "staged"})


@pytest.mark.parametrize("mode", MODES)
def test_messages_cross_in_both_directions_at_once(mode):
    for seed in range(10):
        both_ways(seed, 2, 1, {"cuda_mode": mode})


def test_messages_with_one_tag_arrive_in_order_and_from_anywhere():
    def body(r):
        if r.rank:
            works = [r.pg.send([device_tensor(r, 10 + 5000 * (k % 2), float(k))], 0, 0) for k in range(6)] if r.rank == 1 else []
            works += [r.pg.send([device_tensor(r, 7, 99.0)], 0, 5)] if r.rank == 2 else []
            for w in works:
                w.wait()
            return None
        into = [torch.zeros(10 + 5000 * (k % 2)) for k in range(6)]
        any_one = torch.zeros(7)
        r.keep += [*into, any_one]
        works = [r.pg.recv([t], 1, 0) for t in into]
        anywhere = r.pg.recv_anysource([any_one], 5)
        for w in works:
            w.wait()
        anywhere.wait()
        assert anywhere.source_rank() == 2
        return [float(contents(r, t)[0]) for t in [*into, any_one]]

    for seed in range(6):
        assert run_ranks(3, body, seed=seed)[0] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 99.0]


def test_messages_of_different_sizes_are_told():
    def body(r):
        with pytest.raises(CollectiveMismatchError, match="bytes"):
            if r.rank:
                r.pg.send([device_tensor(r, 40_000, 1.0)], 0).wait()
            else:
                t = torch.zeros(30_000)
                r.keep.append(t)
                r.pg.recv([t], 1).wait()

    run_ranks(2, body)


def test_a_message_that_nobody_sends_times_out():
    def body(r):
        if r.rank:
            return time.sleep(1.0)
        t = torch.zeros(4)
        r.keep.append(t)
        r.pg.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(CollectiveTimeoutError, match="Did rank 1 send it"):
            r.pg.recv([t], 1).wait()

    run_ranks(2, body)


# --- the choice of the mode

def words(gpus, mode="auto", pids=None, **other):
    return [{"gpu": g, "pid": (pids or range(len(gpus)))[i], "mode": mode, "staging": 1, "order": "auto", **other}
            for i, g in enumerate(gpus)]


@pytest.mark.parametrize("table, mode", [
    (words("ab"), "p2p"), (words("aa"), "shared"), (words("aba"), "shared"), (words("a"), "shared"),
    (words("ab", "shared"), "shared"), (words("ab", "staged"), "staged"), (words("aa", pids=[7, 7]), "staged"),
    (words("ab", "p2p"), "p2p")])
def test_the_mode_follows_from_gpus_and_processes(table, mode):
    assert choose(table).name == mode


def test_modes_that_cannot_be_are_refused():
    with pytest.raises(TransportError, match="needs a GPU for each rank"):
        choose(words("aa", "p2p"))
    mixed = words("aa")
    mixed[1]["mode"] = "staged"
    with pytest.raises(TransportError, match="differs between the ranks.*rank 1: staged"):
        choose(mixed)


@pytest.mark.parametrize("step", ["allocate", "export_memory", "open_memory", "export_event", "open_event", "create_event"])
def test_what_one_rank_cannot_do_makes_all_fall_back(step, caplog):
    def body(r):
        t = device_tensor(r, 5000, 1.0)
        if r.rank == 1:
            real = r.driver.create_event

            def create_event(shared=False):
                if shared and step == "create_event":
                    raise RuntimeError("out of luck")
                return real(shared)

            r.driver.create_event = create_event
            if step != "create_event":
                r.driver.fails[step] = RuntimeError("out of luck")
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), next(iter(r.pg._transport._cuda.values())).mode

    with caplog.at_level(logging.INFO, "c10d_custom"):
        results = run_ranks(3, body, config={"cuda_mode": "shared"})
    assert [v for v, _ in results] == [3.0] * 3
    assert {m.name for _, m in results} == {"staged"}
    assert all("rank 1" in m.reason and "out of luck" in m.reason for _, m in results)
    assert sum("in staged mode" in line for line in caplog.messages) == 3     # once for each rank


def test_memory_that_only_seems_shared_is_found_out():
    def body(r):
        t = device_tensor(r, 5000, 1.0)
        if r.rank == 0:
            real = r.driver.open_memory

            def open_memory(handle):     # somewhere else, as a driver that lies gives it
                address = real(handle)
                r.driver.close_memory(address)
                r.lost = r.driver.allocate(65536)
                return r.lost

            r.driver.open_memory = open_memory
            r.driver.close_memory = lambda address, real=r.driver.close_memory: (
                r.driver.free(address) if address == getattr(r, "lost", None) else real(address))
        r.pg.allreduce([t], options(False))
        return next(iter(r.pg._transport._cuda.values())).mode

    modes = run_ranks(2, body, config={"cuda_mode": "shared"})
    assert {m.name for m in modes} == {"staged"} and all("does not read what rank 1" in m.reason for m in modes)


def test_values_that_do_not_work_give_way_to_events():
    def body(r):
        if r.rank == 0:
            r.driver.wait_value = lambda stream, address, value: (_ for _ in ()).throw(RuntimeError("no such operation"))
        t = device_tensor(r, 5000, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), next(iter(r.pg._transport._cuda.values())).mode.reason

    for value, reason in run_ranks(2, body, config={"cuda_mode": "shared", "cuda_order": "values"}):
        assert value == 2.0 and "ordered by events" in reason and "no such operation" in reason


def test_the_simulated_driver_has_the_real_one_s_face():
    import inspect

    from c10d_custom.transport.cuda.driver import CudaDriver, Driver
    from fake_driver import FakeDriver

    for name in Driver.__abstractmethods__:
        faces = {str(inspect.signature(getattr(c, name))) for c in (Driver, CudaDriver, FakeDriver)}
        assert len(faces) == 1, (name, faces)
