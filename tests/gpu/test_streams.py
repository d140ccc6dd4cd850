"""Streams: the operation runs after what is queued, what follows wait() runs after it (and where streams wait for each
other, the host does not), tensors live long enough."""

import gc
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from conformance.cases import Signal

from .device import device_of

BUSY = 0.6  # seconds that a stream is kept busy
PROMPT = 0.3  # within which the host must be through with calls that only enqueue

P2P = os.environ.get("C10D_CUSTOM_CUDA_MODE") == "p2p"
streams_wait = pytest.mark.skipif(not P2P, reason="the host waits for the GPU, but in p2p mode")


def warm(device, count, group=None):
    """The first call of a group allocates and compiles, which waits for the GPU."""
    for asynchronous in (False, True):
        work = dist.all_reduce(device.put(torch.ones(count)), group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()
    device.synchronize()
    dist.barrier()


def equal(tensor, value):
    wrong = tensor.cpu() != value
    return None if not wrong.any() else f"{int(wrong.sum())} of {wrong.numel()} elements are not {value}"


def after_what_is_queued(kind, count, asynchronous):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, count)
    data = device.put(torch.full((count,), -1.0))
    side = device.stream()
    side.wait_stream(device.current())
    with device.on(side):
        device.busy(0.1 * (1 + rank))
        data.fill_(float(rank + 1))
        work = dist.all_reduce(data, async_op=asynchronous)
        if asynchronous:
            work.wait()
        data.mul_(2)  # after it, on the same stream
    device.current().wait_stream(side)
    return equal(data, float(size * (size + 1)))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("count", [3, 100_003, 5_000_000])
def test_runs_after_what_is_queued_and_before_what_follows(ranks, device, count, asynchronous):
    assert not any(found := ranks.run(after_what_is_queued, device, count, asynchronous)), found


def host_goes_on(kind, count, asynchronous):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, count)
    data = device.put(torch.full((count,), float(rank)))
    device.busy(0.01)
    device.synchronize()
    dist.barrier()
    device.busy(BUSY)
    data.add_(1)
    began = time.monotonic()
    work = dist.all_reduce(data, async_op=asynchronous)
    if asynchronous:
        work.wait()
    seconds, idle = time.monotonic() - began, device.idle()
    completed = asynchronous and work.is_completed()
    wrong = [equal(data, size * (size + 1) / 2)]
    if device.queues:
        if seconds > PROMPT or idle:
            wrong.append(f"the host came back after {seconds:.3f} s, when the stream was {'idle' if idle else 'busy'}")
        if completed:
            wrong.append("is_completed() while the work that it waits for was going on")
    if asynchronous and not work.is_completed():
        wrong.append("not completed though its result was read")
    return [w for w in wrong if w]


@streams_wait
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("count", [3, 5_000_000])
def test_the_host_does_not_wait_for_the_gpu(ranks, device, count, asynchronous):
    assert not any(found := ranks.run(host_goes_on, device, count, asynchronous)), found


def overlap(kind, count):
    """A call on an idle side stream is over long before the work that the main stream is busy with."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, count)
    data, side = device.put(torch.full((count,), float(rank + 1))), device.stream()
    device.synchronize()
    dist.barrier()
    device.busy(2 * BUSY)
    with device.on(side):
        work = dist.all_reduce(data, async_op=True)
        work.wait()
    side.synchronize()
    idle = device.idle()
    wrong = [equal_on(device, side, data, size * (size + 1) / 2)]
    if device.queues and idle:
        wrong.append("the call ended only after what the main stream did meanwhile")
    device.synchronize()
    return [w for w in wrong if w]


def equal_on(device, stream, tensor, value):
    with device.on(stream):
        return equal(tensor, value)


@pytest.mark.parametrize("count", [1000, 2_000_000])
def test_overlaps_with_work_on_another_stream(ranks, device, count):
    assert not any(found := ranks.run(overlap, device, count)), found


def many_groups(kind, count):
    """Async calls on three groups, each on a stream of its own, issued in another order on each rank (but in p2p mode,
    whose kernels occupy the GPU while they wait: the same on all)."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    streams = [device.stream() for _ in groups]
    for group in groups:
        warm(device, count, group)
    wrong = []
    for turn in range(6):
        order = [(i + (0 if P2P else rank) + turn) % 3 for i in range(3)]
        issued = {}
        for i in order:
            with device.on(streams[i]):
                device.busy(0.01)
                data = device.put(torch.full((count,), float(i + rank)))
                issued[i] = data, dist.all_reduce(data, group=groups[i], async_op=True)
        for i in reversed(order):
            with device.on(streams[i]):
                issued[i][1].wait()
                if problem := equal(issued[i][0], float(sum(i + r for r in range(size)))):
                    wrong.append(f"turn {turn}, group {i}: {problem}")
    for group in groups:
        dist.destroy_process_group(group)
    return wrong


@pytest.mark.parametrize("count", [100, 1_000_003])
def test_several_groups_and_streams_at_once(ranks, device, count):
    assert not any(found := ranks.run(many_groups, device, count)), found


def one_group_many_streams(kind, count):
    """Calls of one group from four streams: one order for the group, each after its own stream's work."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, count)
    streams, issued = [device.stream() for _ in range(4)], []
    for turn in range(20):
        with device.on(streams[turn % 4]):
            if turn % 3 == rank % 3:
                device.busy(0.005)
            data = device.put(torch.full((count,), float(turn + rank)))
            issued.append((data, dist.all_reduce(data, async_op=True)))
    wrong = []
    for turn, (data, work) in reversed(list(enumerate(issued))):
        work.wait()
        if problem := equal(data, float(sum(turn + r for r in range(size)))):
            wrong.append(f"call {turn}: {problem}")
    return wrong


@pytest.mark.parametrize("count", [10, 300_001])
def test_one_group_from_many_streams(ranks, device, count):
    assert not any(found := ranks.run(one_group_many_streams, device, count)), found


def futures(kind, count):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, count)
    data = device.put(torch.zeros(count))
    device.busy(0.1)
    data.fill_(float(rank + 1))
    work = dist.all_reduce(data, async_op=True)
    chained = work.get_future().then(lambda done: done.value()[0] * 3)
    value = work.get_future().wait()
    total = size * (size + 1) / 2
    wrong = [equal(value[0], total), equal(chained.wait(), 3 * total), equal(data, total)]
    if value[0].data_ptr() != data.data_ptr():
        wrong.append("the future's value is another tensor")
    return [w for w in wrong if w]


@pytest.mark.parametrize("count", [3, 1_000_003])
def test_futures(ranks, device, count):
    assert not any(found := ranks.run(futures, device, count)), found


def dropped(kind, count):
    """Rank 0 drops its tensor at once and fills what memory it gets; the others must see the old content."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, count)
    issued = Signal()
    if rank:
        issued.wait()
    data = device.put(torch.full((count,), float(rank + 1)))
    device.busy(0.05)
    work = dist.all_reduce(data, async_op=True)
    wrong = None
    if rank == 0:
        del data
        gc.collect(1)
        filled = [device.put(torch.full((count,), -7.0)) for _ in range(8)]
        issued.give()
        work.wait()
        wrong = next(filter(None, (equal(f, -7.0) for f in filled)), None)
    else:
        work.wait()
        wrong = equal(data, size * (size + 1) / 2)
    dist.barrier()
    return wrong


@pytest.mark.parametrize("count", [1, 100_003, 3_000_000])
def test_tensors_dropped_by_the_caller(ranks, device, count):
    assert not any(found := ranks.run(dropped, device, count)), found


def wait_with_a_timeout(kind):
    """wait(timeout) blocks the host, as NCCL's does: when it returns, the result is there."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, 1000)
    data = device.put(torch.full((1000,), float(rank + 1)))
    device.busy(0.2)
    work = dist.all_reduce(data, async_op=True)
    assert work.wait(timedelta(seconds=20)) is True
    wrong = [] if work.is_completed() else ["wait(timeout) returned before the end"]
    return wrong + list(filter(None, [equal(data, size * (size + 1) / 2)]))


def test_wait_with_a_timeout(ranks, device):
    assert not any(found := ranks.run(wait_with_a_timeout, device)), found


def outstanding(kind, times):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    issued = []
    for i in range(times):
        data = device.put(torch.full((1 + 999 * (i % 7),), float(rank + i)))
        issued.append((data, dist.all_reduce(data, async_op=True)))
    issued[-1][1].wait()  # the last one's end is the end of all
    return [
        f"call {i}: {problem}"
        for i, (data, _) in enumerate(issued)
        if (problem := equal(data, float(sum(r + i for r in range(size)))))
    ]


def test_200_outstanding(ranks, device):
    assert not any(found := ranks.run(outstanding, device, 200)), found


def captured(kind):
    from c10d_custom.errors import UsageError

    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, 100)
    data, graph, refused = device.put(torch.ones(100)), torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph):
            dist.all_reduce(data)
    except UsageError as error:
        refused = str(error)
    except RuntimeError as error:  # torch's own, at the capture's end, must not hide ours
        refused = str(error.__context__ or error)
    if refused is None:  # a mode that can be captured: replays count
        graph.replay()
        graph.replay()
        return equal(data, float(size**2))
    if "in this mode (p2p)" in refused:
        return f"refused in p2p mode: {refused}"
    device.synchronize()
    after = device.put(torch.full((100,), float(rank)))
    dist.all_reduce(after)
    problem = equal(after, size * (size - 1) / 2)
    return problem or (None if "captur" in refused else f"the error does not speak of the capture: {refused}")


def replayed(kind, count, asynchronous):
    """Replays among eager calls, each rank's input changed in between; for p2p mode."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, count)
    given, data, graph = device.put(torch.zeros(count)), device.put(torch.zeros(count)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data.copy_(given)
        work = dist.all_reduce(data, async_op=asynchronous)
        if asynchronous:
            work.wait()
        data.mul_(2)
    wrong = []
    for turn in range(5):
        given.fill_(float(rank + turn))
        graph.replay()
        other = device.put(torch.full((count,), float(rank)))
        dist.all_reduce(other)
        wrong += [equal(data, 2.0 * sum(r + turn for r in range(size))), equal(other, size * (size - 1) / 2)]
    return [w for w in wrong if w]


def test_graph_capture_works_or_is_refused_clearly(ranks, device, needs_queues):
    assert not any(found := ranks.run(captured, device)), found
