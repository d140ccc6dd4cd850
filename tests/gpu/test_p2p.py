"""The fused kernels, in which ranks wait for each other: each rank needs a GPU of its own, or all must be clients of
MPS, and C10D_CUSTOM_CUDA_P2P_SHARED be 1.

C10D_CUSTOM_CUDA_MODE=p2p asks for them; without it the tests elsewhere run whatever mode the package chooses.
"""

import os
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import c10d_custom
from c10d_custom.transport.cuda import algorithm
from conformance.reference import reduce_in_order
from conformance.test_all_gather import all_gather, all_gather_into_tensor
from conformance.test_all_reduce import all_reduce
from conformance.test_broadcast import broadcast
from conformance.test_reduce_scatter import reduce_scatter, reduce_scatter_tensor
from conformance.values import raw, same_bytes
from harness import RankFailure

from .device import device_of
from .test_streams import after_what_is_queued, captured, equal, many_groups, replayed, warm

pytestmark = pytest.mark.skipif(
    os.environ.get("C10D_CUSTOM_CUDA_MODE") != "p2p", reason="C10D_CUSTOM_CUDA_MODE=p2p is not set"
)


def needs_a_gpu_each(attempt):
    """Skips where the package refuses the mode because ranks share a GPU."""
    try:
        attempt()
    except RankFailure as failure:
        if "needs a GPU for each rank" in str(failure):
            pytest.skip("the package's p2p mode wants a GPU for each rank")
        raise


def nothing_wrong(found):
    assert not any(found), found


KERNEL = algorithm.FUSED_STAGING // 2  # bytes that one takes, at most
GUARD = 64
SIZES = (4, 12, 1024, 4100, 64 << 10, (64 << 10) + 4, 512 << 10, (512 << 10) + 16, 1 << 20, 4 << 20, KERNEL, KERNEL + 8)


def launched():
    """How many fused kernels this rank has launched for the default group; None: no such kernels serve it."""
    found = list(dist.group.WORLD._transport._cuda.values())
    return found[0]._fused.p2p.launched if found and found[0]._fused else None


def numbers(seed, rank, dtype, count):
    made = torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank)) * 10.0 ** (rank % 3)
    return made.view(torch.int32) if dtype == torch.int32 else made.to(dtype)


def bursts(kind, seed, calls):
    """Calls of alternating sizes, several under way at once: what is wrong with their bits, with the memory beside
    them, and with the number of kernels that they took."""
    device, rank, size, rng = device_of(kind), dist.get_rank(), dist.get_world_size(), random.Random(seed)
    dist.all_reduce(device.put(torch.ones(1)))  # sets up
    before, kernels, wrong, done = launched() if device.kernels else 0, 0, [], 0
    while done < calls and not wrong:
        burst = []
        for _ in range(rng.choice([1, 2, 6])):
            done += 1
            dtype, off = rng.choice([torch.float32, torch.bfloat16, torch.int32]), GUARD + rng.choice([0, 0, 1, 3])
            count = max(1, rng.choice(SIZES if device.queues else SIZES[:5]) // dtype.itemsize)
            place = torch.full((off + count + GUARD,), 7, dtype=dtype)
            place[off : off + count] = numbers(done, rank, dtype, count)
            place = device.put(place)
            data = place[off : off + count]
            burst.append((done, dtype, off, count, place, dist.all_reduce(data, async_op=True)))
            kernels += -(-count * dtype.itemsize // KERNEL)
        for number, dtype, off, count, place, work in burst:
            work.wait()
            got = place.cpu()
            want = reduce_in_order([numbers(number, r, dtype, count) for r in range(size)], "SUM")
            if not same_bytes(raw(got[off : off + count]), raw(want)):
                wrong.append(f"call {number}: {count} elements of {dtype}, {off - GUARD} off, are not right")
            if (got[:off] != 7).any() or (got[off + count :] != 7).any():
                wrong.append(f"call {number}: memory beside its tensor was written")
    if device.kernels and launched() - before != kernels:
        wrong.append(f"{launched() - before} kernels were launched, not {kernels}")
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_bits_of_bursts_by_fused_kernels(ranks, device, seed):
    def attempt():
        assert not any(found := ranks.run(bursts, device, seed, 100 if device == "cuda" else 10)), found

    needs_a_gpu_each(attempt)


def replayed_often(kind, count, times):
    """With no host in between."""
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    warm(device, count)
    given, data, graph = device.put(torch.full((count,), float(rank))), device.put(torch.zeros(count)), None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data.copy_(given)
        dist.all_reduce(data)
    for _ in range(times):
        graph.replay()
    return equal(data, size * (size - 1) / 2)


@pytest.mark.parametrize("count, times", [(3, 1000), (1_000_003, 300), (5_000_000, 50)])
def test_many_replays(ranks, device, needs_queues, count, times):
    if ranks.world_size == 1:
        pytest.skip("a single rank needs no fused kernels")

    def attempt():
        assert not any(found := ranks.run(replayed_often, device, count, times)), found

    needs_a_gpu_each(attempt)


@pytest.mark.parametrize("section", ["small", "sizes", "mixed"])
def test_all_reduce(conform, section):
    needs_a_gpu_each(lambda: conform(all_reduce, (section,), reducing=True))


@pytest.mark.parametrize("perform", [all_gather, all_gather_into_tensor, broadcast])
def test_what_only_moves(conform, perform):
    needs_a_gpu_each(lambda: conform(perform, ("small", "sizes")))


@pytest.mark.parametrize("perform", [reduce_scatter, reduce_scatter_tensor])
def test_reduce_scatter(conform, perform):
    needs_a_gpu_each(lambda: conform(perform, ("small",), reducing=True))


def in_a_row(device, count, put=None):
    """(what queues a call of each operation on tensors of its own, what is wrong with their results)"""
    put = put or device.put
    rank, size = dist.get_rank(), dist.get_world_size()
    ones = torch.ones(count * size)
    gathered, part, cast, total = (put(0 * ones[: k * count]) for k in (size, 1, 1, 1))
    given, inputs = put(ones[:count] + rank), put(ones * (1 + rank))

    def calls():
        cast.copy_(given)
        total.copy_(given)
        works = [dist.all_gather_into_tensor(gathered, given, async_op=True)]
        works += [dist.reduce_scatter_tensor(part, inputs, async_op=True)]
        works += [dist.broadcast(cast, size - 1, async_op=True), dist.all_reduce(total, async_op=True)]
        for work in works:
            work.wait()

    def wrong():
        found = [equal(gathered[r * count : (r + 1) * count], 1.0 + r) for r in range(size)]
        found += [equal(t, size * (size + 1) / 2) for t in (part, total)] + [equal(cast, float(size))]
        return [f for f in found if f]

    return calls, wrong


def ahead(kind, count):
    """Rank 0 makes its calls before the others begin with theirs: the hosts do not meet."""
    device, store = device_of(kind), dist.distributed_c10d._get_default_store()
    calls, wrong = in_a_row(device, count)
    calls()
    device.synchronize()
    dist.barrier()
    before = launched()
    if device.queues and dist.get_rank():
        store.wait([f"ahead {count}"], timedelta(seconds=20))
    for _ in range(5):
        calls()
    store.set(f"ahead {count}", "")
    few = [] if before is None or launched() - before >= 20 else [f"{launched() - before} kernels"]
    return [*wrong(), *few]


@pytest.mark.parametrize("count", [5, 300_001])
def test_a_rank_runs_ahead(ranks, device, count):
    if ranks.world_size == 1:
        pytest.skip("a single rank has nobody to run ahead of")
    needs_a_gpu_each(lambda: nothing_wrong(ranks.run(ahead, device, count)))


def read_where_they_lie(kind, count):
    """All are of c10d_custom.empty: whatever their size, one kernel for each call."""
    device = device_of(kind)
    dist.all_reduce(device.put(torch.ones(1)))
    calls, wrong = in_a_row(device, count, lambda t: c10d_custom.empty(t.shape, device=device.name).copy_(t))
    found, before = [], launched() or 0
    for _ in range(3):
        calls()
        found += wrong()
    many = (launched() or 0) - before if device.queues else 12
    return [*found, *([] if many == 12 else [f"{many} kernels"])]


@pytest.mark.parametrize("count", [300_000, 5_000_000])
def test_tensors_that_are_read_where_they_lie(ranks, device, count):
    if ranks.world_size == 1:
        pytest.skip("a single rank needs no fused kernels")
    needs_a_gpu_each(lambda: nothing_wrong(ranks.run(read_where_they_lie, device, count)))


def rows_replayed(kind, count):
    device = device_of(kind)
    calls, wrong = in_a_row(device, count)
    calls()
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    found = []
    for _ in range(20):
        graph.replay()
        found += wrong()
    return found


@pytest.mark.parametrize("count", [5, 300_001])
def test_every_operation_in_a_graph(ranks, device, needs_queues, count):
    if ranks.world_size == 1:
        pytest.skip("a single rank needs no fused kernels")
    needs_a_gpu_each(lambda: nothing_wrong(ranks.run(rows_replayed, device, count)))


@pytest.mark.parametrize("case", [after_what_is_queued, many_groups], ids=["one group", "several groups"])
def test_streams(ranks, device, case):
    def attempt():
        arguments = (100_003, True) if case is after_what_is_queued else (100_003,)
        assert not any(found := ranks.run(case, device, *arguments)), found

    needs_a_gpu_each(attempt)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("count", [3, 1_000_003])
def test_replays(ranks, device, needs_queues, count, asynchronous):
    if ranks.world_size == 1:
        pytest.skip("a single rank needs no fused kernels")

    def attempt():
        assert not any(found := ranks.run(replayed, device, count, asynchronous)), found

    needs_a_gpu_each(attempt)


def test_graph_capture_works(ranks, device, needs_queues):
    if ranks.world_size == 1:
        pytest.skip("a single rank needs no fused kernels")

    def attempt():
        assert not any(found := ranks.run(captured, device)), found

    needs_a_gpu_each(attempt)
