"""Works, futures and streams of a group's CUDA tensors, on a simulated GPU."""

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import BarrierOptions

from c10d_custom import lowering
from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError, UsageError
from device_tensors import contents, device_tensor, options, warm
from thread_ranks import cpu_tensors, run_ranks

pytestmark = pytest.mark.lane2

MODES = {
    "shared": {"cuda_mode": "shared"},
    "staged": {"cuda_mode": "staged"},
    "by size": {"cuda_mode": "shared", "cuda_host_bytes": 512},
}


@pytest.mark.parametrize("mode", MODES)
def test_wait_lets_the_stream_wait_and_not_the_host(mode):
    def body(r):
        warm(r)
        t = torch.zeros(100)
        gate = threading.Event()
        with r.driver.activate():  # a kernel of the user's that takes its time
            r.driver.user(r.driver.current_stream(), lambda: t.fill_(1.0), writes=[t], ready=gate.is_set)
        work = r.pg.allreduce([t], options(True))
        assert not work.is_completed()
        gate.set()
        work.wait()
        got = contents(r, t)
        assert work.is_completed() and work.is_success() and work.exception() is None
        return got[0].item()

    assert run_ranks(2, body, config=MODES[mode]) == [2.0, 2.0]


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

    assert run_ranks(2, body, config=MODES[mode]) == [2.0, 2.0]


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

    assert run_ranks(3, body, config=MODES[mode]) == [9.0] * 3


@pytest.mark.parametrize("mode", MODES)
def test_tensors_live_until_the_gpu_is_done_though_nobody_waits(mode):
    dropped, together = [False, False], threading.Barrier(2)

    def both(rank, so):
        dropped[rank] = so
        together.wait(60)
        answer = all(dropped)
        together.wait(60)
        return answer

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
        while not both(r.rank, gone() is None or time.monotonic() > until):  # as many calls on each
            r.pg.allreduce([device_tensor(r, 1, 0.0)], options(True)).wait()  # new Works let go of old ones
            r.synchronize()
        assert gone() is None

    run_ranks(2, body, config=MODES[mode])


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

    run_ranks(2, body, config=MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_cpu_and_cuda_tensors_in_one_order(mode):
    def body(r):
        device, host = device_tensor(r, 3000, 1.0), torch.ones(3000)
        works = []
        for _ in range(5):
            works.append(r.pg.allreduce([device], options(True)))
            with cpu_tensors():
                works.append(r.pg.allreduce([host], options(True)))
                r.pg.allreduce([host], options(False))  # the quick way
        for w in works:
            w.wait()
        return contents(r, device)[0].item(), host[0].item()

    assert run_ranks(2, body, config=MODES[mode]) == [(2.0**5, 2.0**10)] * 2


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

    assert run_ranks(3, body, laziness=1.0, config=MODES[mode]) == [[0, 1, 2]] * 3


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
    monkeypatch.setattr(lowering, "device_of", lambda t: places.get(id(t)))
    lower = lowering.Lowering(0, 2)
    here, there = torch.zeros(4), torch.zeros(2)
    places[id(here)] = torch.device("cuda", 0)
    for lowered in (
        lambda: lower.all_gather_single(here, there, 1.0),
        lambda: lower.all_gather([there, here], there, 1.0),
        lambda: lower.reduce_scatter_single(there, here, ReduceOp.SUM, 1.0),
        lambda: lower.all_to_all_single(here, here.clone(), [], [], 1.0),
    ):
        with pytest.raises(UsageError, match="is on"):
            lowered()


def on_cpu(tensor):
    tensor.on_cpu = True
    return tensor


COALESCED = {
    "all_reduce": lambda pg, *each: pg.allreduce_coalesced(each, options(False)),
    "all_gather": lambda pg, *each: pg.allgather_coalesced([each, each], each, options(False)),
    "all_gather_into_tensor": lambda pg, *each: pg.all_gather_single_coalesced(
        [on_cpu(t.repeat(2)) if hasattr(t, "on_cpu") else t.repeat(2) for t in each], each, options(False)
    ),
    "reduce_scatter_tensor": lambda pg, *each: pg.reduce_scatter_single_coalesced(
        [on_cpu(t[:2]) if hasattr(t, "on_cpu") else t[:2] for t in each], each, None
    ),
}


@pytest.mark.parametrize("name", COALESCED)
@pytest.mark.parametrize("cpu_first", [False, True], ids=["gpu_first", "cpu_first"])
def test_a_list_of_tensors_on_two_devices_is_refused(name, cpu_first):
    """By the rank whose list it is, and the group stays usable where it is every rank's; else the others are told."""

    def body(r):
        def call(cpu_list):
            each = [device_tensor(r, 4, 1.0), on_cpu(torch.ones(4)) if cpu_list else device_tensor(r, 4, 1.0)]
            COALESCED[name](r.pg, *(reversed(each) if cpu_first else each)).wait()

        with pytest.raises(UsageError, match=f"^{name}.*tensor 1 of the list is on c.* must be on one device"):
            call(True)
        t = device_tensor(r, 4, 1.0)
        r.pg.allreduce([t], options(False))
        assert contents(r, t)[0].item() == 2.0
        with pytest.raises(UsageError if r.rank else CollectiveMismatchError) as raised:
            call(r.rank == 1)
        return str(raised.value)

    told, _ = run_ranks(2, body)
    assert "rank 1: a call whose arguments were refused" in told, told


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_parts_of_different_sizes_are_refused_by_the_root(name):
    """The others are told."""

    def body(r):
        own = [device_tensor(r, 4 + r.rank, 1.0)]
        parts = [[device_tensor(r, 4 + i, 1.0) for i in range(r.size)]] if r.rank == 0 else []
        arguments = (parts, own) if name == "gather" else (own, parts)
        with pytest.raises(CollectiveMismatchError if r.rank else UsageError) as raised:
            getattr(r.pg, name)(*arguments, None, 0).wait()
        return str(raised.value)

    refused, told = run_ranks(2, body)
    assert refused.startswith(f"{name}: parts of different sizes are for CPU tensors only: on cuda"), refused
    assert "rank 0: a call whose arguments were refused" in told, told


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_is_refused(mode):
    def body(r):
        warm(r)
        r.driver.is_capturing = True
        with pytest.raises(UsageError, match=f"CUDA graph.*{MODES[mode]['cuda_mode']}"):
            r.pg.allreduce([device_tensor(r, 4, 1.0)], options(False))
        r.driver.is_capturing = False
        t = device_tensor(r, 4, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item()

    assert run_ranks(2, body, config=MODES[mode]) == [2.0, 2.0]


@pytest.mark.parametrize("mode", MODES)
def test_what_another_stream_waits_for_is_kept_for_the_one_of_the_issue(mode):
    """Freed, its memory would be that stream's again, which has not waited."""

    def body(r):
        warm(r)
        with r.driver.activate():
            other = r.driver.create_stream()
        t, gate = torch.ones(100), threading.Event()
        gone = weakref.ref(t)
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        work = r.pg.allreduce([t], options(True))
        gate.set()  # it is done when the host has waited
        with r.driver.on(other):
            work.wait()
        del work, t
        assert gone() is not None
        for _ in range(30):  # new Works let go of old ones, once the GPU is done with them
            r.pg.allreduce([device_tensor(r, 1, 0.0)], options(True)).wait()
            r.synchronize()
        assert gone() is None
        with r.driver.on(other):
            r.synchronize()
        with r.driver.activate():
            r.driver.destroy_stream(other)

    run_ranks(2, body, config=MODES[mode], laziness=1.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["leaf", "inference"])
def test_results_are_copied_back_past_autograd(mode, kind):
    """By another thread, with modes of its own."""

    def body(r):
        if kind == "leaf":
            t = torch.nn.Parameter(torch.zeros(6, 4).t())
        else:
            with torch.inference_mode():
                t = torch.zeros(6, 4).t()
        r.keep.append(t)
        r.pg.allreduce([t], options(True)).wait()
        r.pg.allreduce([t], options(False))
        send = r.pg.send([torch.full((4, 6), 5.0)], 1 - r.rank, 0)
        r.pg.recv([t], 1 - r.rank, 0).wait()
        send.wait()
        return contents(r, t.detach()).unique().tolist()

    assert run_ranks(2, body, config=MODES[mode]) == [[5.0]] * 2
