"""Ranks that are late, stopped or killed where the fused kernels of the others wait for them: nobody waits for ever.

What becomes of the others' CUDA when a client of MPS is killed is CUDA's business: their calls raise, ours or CUDA's
errors."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveTimeoutError, CustomBackendError
from harness import RankFailure, RankPool

from .device import device_of
from .test_faults import raised
from .test_p2p import needs_a_gpu_each, pytestmark  # noqa: F401

RANKS, COUNT = 3, 1000
SOON = 4.0  # seconds after which whoever waits has been let go, where the call itself has more


def begin(kind, seconds):
    """(a device, a group of so long a time-out, which has its mode, a tensor)"""
    device = device_of(kind)
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    data = device.put(torch.ones(COUNT))
    dist.all_reduce(data, group=group)
    device.synchronize()
    return device, group, data


def everyone():
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([os.getpid()]))
    return [int(t) for t in found]


def kill_later(pid, seconds):
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def graph_of(device, group, data):
    """What replays one all_reduce; on the CPU a call."""
    if not device.queues:
        return lambda: dist.all_reduce(data, group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(data, group=group)
    device.synchronize()
    return graph.replay


def call_and_wait(data, group):
    """For the GPU, too."""
    dist.all_reduce(data, group=group, async_op=True).wait(timedelta(seconds=20))


def until_one_raises(device, *calls):
    """(what was raised, after how long): by the calls, one after the other, or by the GPU's end of them."""
    began = time.monotonic()
    try:
        for call in calls:
            call()
            device.synchronize()
    except (CustomBackendError, RuntimeError) as error:
        return error, time.monotonic() - began
    raise AssertionError("nothing was raised")


def late_stream(kind):
    """The last rank's stream comes too late to a call that all hosts have entered."""
    device, group, data = begin(kind, 2.0)
    dist.barrier()
    if dist.get_rank() == RANKS - 1:
        device.busy(4.0)
    work = dist.all_reduce(data, group=group, async_op=True)
    work.wait()
    device.synchronize()
    time.sleep(0.2)
    error = raised(work.is_completed, CustomBackendError)
    raised(lambda: dist.all_reduce(data, group=group), CustomBackendError)
    dist.barrier()
    dist.destroy_process_group(group)
    after = device.put(torch.ones(3))
    dist.all_reduce(after)  # other groups go on
    assert after.tolist() == [RANKS] * 3
    return type(error).__name__, str(error)


def test_a_stream_that_comes_late(device, backend, needs_queues):
    pool = RankPool(RANKS, backend)

    def attempt():
        found = pool.run(late_stream, device, timeout=25)
        waited = [text for kind, text in found[:-1] if kind == CollectiveTimeoutError.__name__]
        assert waited and all(f"the stream of rank {RANKS - 1}" in text for text in waited), found

    needs_a_gpu_each(attempt)
    assert pool.close() is None


def stopped(kind):
    """Rank 1 is stopped: the others' replay ends at its time-out, and so does a call of theirs in another group."""
    device, group, data = begin(kind, 3.0)
    eager = begin(kind, 2.0)[1]
    replay, pids = graph_of(device, group, data), everyone()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        found = None
    else:
        time.sleep(0.3)
        error, seconds = until_one_raises(
            device, replay, lambda: time.sleep(0.3), lambda: dist.all_reduce(data, group=group)
        )
        late = raised(lambda: call_and_wait(data, eager), CollectiveTimeoutError)
        found = str(error), seconds, str(late)
        if dist.get_rank() == 0:
            time.sleep(1.0)  # for the others to come as far
            os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    for g in (eager, group):
        dist.destroy_process_group(g)
    return found


def test_a_rank_that_is_stopped(device, backend):
    pool = RankPool(RANKS, backend)

    def attempt():
        for found in pool.run(stopped, device, timeout=25)[::2]:
            assert found[1] < 3.0 + SOON and "rank 1" in found[2], found

    needs_a_gpu_each(attempt)
    pool.discard()


def killed_before_it_joins(kind):
    """Rank 1, whose GPU is idle, is killed while the others' replay waits for it."""
    device, group, data = begin(kind, 20.0)
    replay, pids = graph_of(device, group, data), everyone()
    if dist.get_rank() == 1:
        time.sleep(30)
    if dist.get_rank() == 0:
        kill_later(pids[1], 1.0)
    return until_one_raises(device, replay, lambda: time.sleep(0.3), lambda: dist.all_reduce(data, group=group))


def killed_amid_calls(kind):
    """Rank 1 is killed while fused kernels, its own among them, run one after the other."""
    device, group, data = begin(kind, 20.0)
    pids = everyone()
    if dist.get_rank() == 0:
        kill_later(pids[1], 1.0)

    def endless():
        while True:
            dist.all_reduce(data, group=group)

    return until_one_raises(device, endless)


def killed_while_busy(kind):
    """Rank 1 is killed while a kernel of its user's runs, behind which its part of the call is queued."""
    device, group, data = begin(kind, 20.0)
    pids, rank = everyone(), dist.get_rank()
    if rank == 0:
        kill_later(pids[1], 1.0)
    if rank == 1:
        device.busy(4.0)
    works = [dist.all_reduce(data, group=group, async_op=True)]
    if rank == 1:
        time.sleep(30)
    return until_one_raises(
        device,
        lambda: time.sleep(0.8),
        works[0].wait,
        works[0].is_completed,
        lambda: dist.all_reduce(data, group=group),
    )


def survive(case, kind):
    error, seconds = case(kind)
    raise RuntimeError(f"SURVIVOR {dist.get_rank()} after {seconds:.2f} s: {type(error).__name__}: {error}")


@pytest.mark.parametrize("case", [killed_before_it_joins, killed_amid_calls, killed_while_busy])
def test_a_rank_that_is_killed(device, backend, case):
    pool = RankPool(RANKS, backend)

    def attempt():
        with pytest.raises(RankFailure) as failure:
            pool.run(survive, case, device, timeout=25)
        text = str(failure.value)
        if "needs a GPU for each rank" in text:
            raise failure.value
        print(text)
        for survivor in (0, 2):
            after = text.partition(f"SURVIVOR {survivor} after ")[2].split(" ")[0]
            assert after and float(after) < 1.0 + SOON, text

    needs_a_gpu_each(attempt)
