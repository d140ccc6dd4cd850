"""What the Work of an asynchronous call promises, and who keeps its tensors alive."""

import gc
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from . import reference
from .cases import Case, Signal, check
from .cases import group as make_group

pytestmark = pytest.mark.world_sizes(2, 4)  # what lies above the transports is the same for any number of ranks


def _issue(name, g, count):
    """An async call; (work, what it uses, [(output, expected)])."""
    moved, summed = Case(torch.float32, count), Case(torch.int64, count, "SUM", "rough")
    everyone = [g.input(moved, i) for i in range(g.size)]
    if name == "all_reduce":
        data = g.input(summed)
        return dist.all_reduce(data, async_op=True), [data], [(data, g.reduced(summed))]
    if name == "broadcast":
        data = g.input(moved)
        return dist.broadcast(data, 0, async_op=True), [data], [(data, everyone[0])]
    if name == "reduce":
        data = g.input(summed)
        checked = [(data, g.reduced(summed))] if g.me == 0 else []
        return dist.reduce(data, 0, async_op=True), [data], checked
    if name == "all_gather":
        data, outputs = g.input(moved), [torch.zeros(count) for _ in g.ranks]
        return dist.all_gather(outputs, data, async_op=True), [data], list(zip(outputs, everyone))
    if name == "all_gather_into_tensor":
        data, output = g.input(moved), torch.zeros(g.size * count)
        work = dist.all_gather_into_tensor(output, data, async_op=True)
        return work, [data], [(output, torch.cat(everyone))]
    if name == "gather":
        data, outputs = g.input(moved), [torch.zeros(count) for _ in g.ranks] if g.me == 0 else None
        work = dist.gather(data, outputs, 0, async_op=True)
        return work, [data], list(zip(outputs or [], everyone))
    if name == "reduce_scatter_tensor":
        data, output = g.input(summed, count=g.size * count), torch.zeros(count, dtype=torch.int64)
        work = dist.reduce_scatter_tensor(output, data, async_op=True)
        return work, [data], [(output, g.reduced(summed, start=g.me * count))]
    if name == "scatter":
        data = [g.input(moved, start=i * count) for i in range(g.size)] if g.me == 0 else None
        output = torch.zeros(count)
        work = dist.scatter(output, data, 0, async_op=True)
        return work, data, [(output, g.input(moved, 0, start=g.me * count))]
    if name == "all_to_all_single":
        data, output = g.input(moved, count=g.size * count), torch.zeros(g.size * count)
        want = torch.cat([g.input(moved, i, start=g.me * count) for i in range(g.size)])
        return dist.all_to_all_single(output, data, async_op=True), [data], [(output, want)]
    assert name == "isend"  # around a ring
    data, output = g.input(moved), torch.zeros(count)
    received = dist.irecv(output, (g.me - 1) % g.size)
    sent = dist.isend(data, (g.me + 1) % g.size)
    received_from = everyone[(g.me - 1) % g.size]
    return _Both(sent, received), [data], [(output, received_from)]


class _Both:
    def __init__(self, *works):
        self._works = works

    def wait(self):
        for work in self._works:
            work.wait()


ALL = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "reduce_scatter_tensor",
    "scatter",
    "all_to_all_single",
    "isend",
)


def _differences(checked):
    return [problem for problem in (reference.difference(got, want) for got, want in checked) if problem]


def _dropped(name, count, everything):
    """Rank 0 issues, drops its tensors and fills new memory, before any other rank has come."""
    g = make_group()
    issued = Signal()
    if g.me:
        issued.wait()
    work, used, checked = _issue(name, g, count)
    if g.me == 0:
        if everything:
            checked = []
        del used
        gc.collect(1)  # what is new: the modules of torch take a second to look through
        filled = [torch.full((count * n,), -7.0) for n in (1, 2, g.size) for _ in range(8)]
        issued.give()
        if everything:
            del work
            gc.collect(1)
            filled.append(torch.full((count,), -7.0))
    if g.me or not everything:
        work.wait()
    wrong = _differences(checked)
    dist.barrier()  # rank 0 has no other way to know that all is over
    return wrong


@pytest.mark.parametrize("everything", [False, True], ids=["inputs", "inputs-outputs-work"])
@pytest.mark.parametrize("name", ALL)
def test_tensors_dropped_by_the_caller(ranks, backend, name, everything):
    if backend == "gloo" and everything and name == "isend":
        pytest.skip("gloo: a send ends with its Work")
    for count in (1, 100003):
        check(ranks, _dropped, name, count, everything)


def _returns_at_once(name, count):
    """Async calls do not wait for the others, nor are they over before these have come."""
    g = make_group()
    issued = Signal()
    wrong = []
    if g.me:
        issued.wait()
        work, _, checked = _issue(name, g, count)
    else:
        work, _, checked = _issue(name, g, count)
        if name in ("all_reduce", "all_gather", "all_to_all_single") and work.is_completed():
            wrong.append("completed before the other ranks had joined")
        issued.give()
    work.wait()
    return wrong + _differences(checked)


@pytest.mark.parametrize("name", ALL)
def test_returns_at_once(ranks, name):
    for count in (1, 1 << 20):
        check(ranks, _returns_at_once, name, count)


def _outstanding(count, waits):
    g = make_group()
    issued = [_issue(ALL[i % len(ALL)], g, 10 + 999 * (i % 7)) for i in range(count)]
    for work, _, _ in reversed(issued) if waits == "reverse" else issued[-1:]:
        work.wait()
    if waits == "last":  # but point-to-point calls are no part of the order of collectives
        for work, _, _ in issued:
            if isinstance(work, _Both):
                work.wait()
    return [f"call {i}: {problem}" for i, (_, _, checked) in enumerate(issued) for problem in _differences(checked)]


def test_200_outstanding_waited_in_reverse(ranks):
    check(ranks, _outstanding, 200, "reverse")


def test_200_outstanding_last_one_waited(ranks, beyond_gloo):
    """Collectives of one group run in the order of issue: the last one's end is the end of all."""
    beyond_gloo("runs collectives of one group at the same time")
    check(ranks, _outstanding, 200 - 1, "last")


def _work_methods():
    g = make_group()
    wrong = []

    def expect(what, got, want):
        if got != want:
            wrong.append(f"{what}: {got!r} instead of {want!r}")

    for count in (3, 300000):
        case = Case(torch.float32, count, "SUM", "mild")
        data = g.input(case)
        work = dist.all_reduce(data, async_op=True)
        expect("wait(timeout)", work.wait(timedelta(seconds=30)), True)
        expect("wait() again", work.wait(), True)
        expect("is_completed()", work.is_completed(), True)
        expect("is_success()", work.is_success(), True)
        expect("exception()", work.exception(), None)
        future = work.get_future()
        future.wait()
        expect("get_future().done()", future.done(), True)
        for what, value in (("get_future().value()", future.value()), ("result()", work.result())):
            if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], torch.Tensor)):
                wrong.append(f"{what} is no list of one tensor: {value!r:.200}")
            elif value[0].data_ptr() != data.data_ptr():
                wrong.append(f"{what} is another tensor than the output")
        wrong += _differences([(data, g.reduced(case))])
    return wrong


def test_work_methods(ranks):
    check(ranks, _work_methods)


def _future_value(name):
    """A list of tensors, as DDP's hooks expect."""
    work, _, checked = _issue(name, make_group(), 1000)
    value = work.get_future().wait()
    wrong = _differences(checked)
    if not isinstance(value, list) or not all(isinstance(t, torch.Tensor) for t in value):
        wrong.append(f"{value!r:.200}")
    elif reference.difference(value[0], checked[0][1]):
        wrong.append("the value is not the output")
    return wrong


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_future_value(ranks, backend, name):
    if backend == "gloo" and name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        pytest.skip("gloo: the future is not there, or holds the output's chunks")
    check(ranks, _future_value, name)


def _callbacks(count):
    """then() of an unfinished call runs after it; its result is another future's value."""
    g = make_group()
    issued = Signal()
    case = Case(torch.float32, count, "SUM", "mild")
    data = g.input(case)
    if g.me:
        issued.wait()
    future = dist.all_reduce(data, async_op=True).get_future().then(lambda done: done.value()[0] / g.size)
    issued.give()
    return _differences([(future.wait(), g.reduced(case) / g.size)])


def test_callbacks(ranks):
    for count in (5, 300000):
        check(ranks, _callbacks, count)


def _collective_in_callback():
    g = make_group()
    case = Case(torch.float32, 1000, "SUM", "mild")
    data = g.input(case)

    def twice(done):
        again = done.value()[0] * 2
        dist.all_reduce(again)
        return again

    future = dist.all_reduce(data, async_op=True).get_future().then(twice)
    return _differences([(future.wait(), 2 * g.size * g.reduced(case))])


def test_collective_in_callback(ranks):
    """Communication hooks of DDP do that: a callback must not run where the group's work is done."""
    check(ranks, _collective_in_callback)


def _completion():
    """A receive is not complete before its message was sent, and is soon after, waited for or not."""
    g = make_group()
    looked = Signal()
    wrong = []
    if g.me == 0:
        got = torch.zeros(10)
        work = dist.irecv(got, 1)
        if work.is_completed():
            wrong.append("completed before it was sent")
        looked.give()
        deadline = time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not work.is_completed():
            wrong.append("does not complete unless waited for")
        work.wait()
        wrong += _differences([(got, torch.arange(10.0))])
    elif g.me == 1:
        looked.wait()
        dist.send(torch.arange(10.0), 0)
    return wrong


def test_completion(ranks, beyond_gloo):
    beyond_gloo("is_completed() of a receive says True from the start")
    check(ranks, _completion)


def _wait_times_out():
    """On a group of its own, which is good for nothing afterwards."""
    pg = dist.new_group(list(range(dist.get_world_size())))
    done = Signal()
    wrong = []
    if dist.get_rank() == 0:
        data = torch.ones(10)
        for name, work in (
            ("irecv", dist.irecv(data, 1, group=pg)),
            ("all_reduce", dist.all_reduce(torch.ones(10), group=pg, async_op=True)),
        ):
            started = time.monotonic()
            try:
                work.wait(timedelta(milliseconds=500))
                wrong.append(f"{name}: wait(timeout) returned")
            except (RuntimeError, TimeoutError):
                pass
            if not time.monotonic() - started < 10:
                wrong.append(f"{name}: wait(0.5 s) took {time.monotonic() - started:.1f} s")
        done.give()
    else:
        done.wait()
    dist.destroy_process_group(pg)
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_wait_times_out(ranks):
    check(ranks, _wait_times_out)


def _wakes(pauses):
    """A program that computes for 40 ms after each small asynchronous call is not woken meanwhile."""
    t = torch.ones(3)
    dist.barrier()
    before = _switches()
    for _ in range(pauses):
        dist.all_reduce(t, async_op=True).wait()
        time.sleep(0.04)
    woken = _switches() - before
    # A few for each call, and this thread's sleep. A worker that looked every 0.3 ms would make 130 of them.
    return [f"{woken} switches to a thread of this process in {pauses} pauses"] if woken > 20 * pauses else []


def _switches():
    """How often a thread of this process has given up its core or lost it."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as status:
            found += sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)
    return found


@pytest.mark.world_sizes(2)
def test_the_worker_sleeps_between_calls(ranks, beyond_gloo):
    beyond_gloo("what our threads do")
    check(ranks, _wakes, 25)
