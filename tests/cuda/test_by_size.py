"""Which collectives of ranks that share a GPU go through host memory, and that what they give is right."""

import logging
from unittest import mock

import numpy
import pytest
import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions, ReduceScatterOptions

from c10d_custom.errors import CollectiveMismatchError
from c10d_custom.transport.cuda import shared, staged
from device_tensors import contents, device_tensor, options, warm
from fake_driver import FakeDriver
from fake_world import World
from in_place_ranks import programs
from test_shared import HALF, SHARED, program
from thread_ranks import run_ranks

LIMIT = 6000
BY_SIZE = {**SHARED, "cuda_host_bytes": LIMIT}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_collective_among_larger_ones(size, full):
    for seed in range((200 if size < 5 else 50) if full else (3 if size < 5 else 1)):
        program(5000 * size + seed, size, 10, {**SHARED, "cuda_host_bytes": HALF})


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_collective_among_those_in_place(size, full):
    config = {"cuda_host_bytes": 1024, "cuda_in_place_bytes": 2048}
    seeds = range(7000 * size, 7000 * size + ((50 if size < 5 else 20) if full else (2 if size < 5 else 1)))
    assert sum(programs(seed, size, config, seconds=60.0) for seed in seeds) > 0


@pytest.mark.parametrize("gpus, config", [(None, {}), (["GPU-0", "GPU-1"], {"cuda_mode": "p2p"})])
def test_arrays_that_come_by_dlpack(gpus, config):
    """As cupy's do, whose memory is not of torch's allocator: several arrays in one allocation, which torch has never
    seen whole. numpy stands in for cupy, so this proves the transport's part alone, of each way."""

    def body(r):
        warm(r)
        pool = numpy.full(40_000, 7.0, dtype=numpy.float32)  # an allocation of a pool of cupy's
        r.keep.append(pool)
        r.driver.segment_at(pool.ctypes.data, pool.nbytes)
        for first, count in ((8, 100), (200, 1000), (2000, 30_001)):
            mine = pool[first : first + count]
            tensor = torch.from_dlpack(mine)
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda t=tensor: t.fill_(r.rank + 1.0), writes=[tensor])
            r.pg.allreduce([tensor], options(False))
            r.synchronize()
            assert (mine == 3.0).all(), "the result is not in the array"
            assert pool[first - 1] == pool[first + count] == 7.0
            del tensor

    run_ranks(
        2, body, gpus=gpus, in_place=True, config={"cuda_host_bytes": 1024, "cuda_in_place_bytes": 8192, **config}
    )


class Ways:
    """A context in which the ways that collectives of all ranks took are noted."""

    def __enter__(self):
        self.noted = noted = []

        def noting(kind, way, name="run"):
            def run(self, *arguments, real=getattr(kind, name)):
                noted.append(way)
                return real(self, *arguments)

            return mock.patch.object(kind, name, run)

        self._patches = [noting(staged.StagedCollectives, "Staged")]
        self._patches.append(noting(shared.SharedCollectives, "Shared", "run_here"))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error):
        for patch in self._patches:
            patch.stop()


def way_of(call, size=3, config=BY_SIZE, **more):
    """``call(rank)`` on every rank: the way that it took, alike on all."""

    def body(r):
        warm(r)
        if r.rank == 0:
            ways.noted.clear()
        r.world.barrier(size)
        call(r)
        r.synchronize()

    with Ways() as ways:
        run_ranks(size, body, config=config, **more)
    assert len(ways.noted) == size and len(set(ways.noted)) == 1, ways.noted
    return ways.noted[0]


def all_reduce(nbytes):
    return lambda r: r.pg.allreduce([device_tensor(r, nbytes // 4, 1.0)], options(False))


def broadcast(nbytes):
    return lambda r: r.pg.broadcast([device_tensor(r, nbytes // 4, 1.0)], BroadcastOptions()).wait()


def all_gather(nbytes):
    def call(r):
        parts = [device_tensor(r, nbytes // 4 // r.size, 1.0) for _ in range(r.size)]
        r.pg.allgather([parts], [device_tensor(r, nbytes // 4 // r.size, 1.0)], AllgatherOptions()).wait()

    return call


def reduce_scatter(nbytes):
    def call(r):
        parts = [device_tensor(r, nbytes // 4 // r.size, 1.0) for _ in range(r.size)]
        r.pg.reduce_scatter([device_tensor(r, nbytes // 4 // r.size, 1.0)], [parts], ReduceScatterOptions()).wait()

    return call


@pytest.mark.parametrize("operation", [all_reduce, broadcast, all_gather, reduce_scatter])
def test_up_to_the_limit_through_host_memory(operation):
    assert way_of(operation(LIMIT)) == "Staged"
    assert way_of(operation(LIMIT + 12)) == "Shared"


@pytest.mark.parametrize("most, way", [(LIMIT, "Staged"), (LIMIT + 8, "Shared")])
def test_where_parts_are_uneven_the_largest_sum_of_any_rank_counts(most, way):
    """Rank 0 sends nearly all of it, and to rank 1 alone."""
    counts = [[2, most // 4 - 3, 1], [1, 0, 0], [0, 1, 0]]

    def call(r):
        sends, takes = counts[r.rank], [row[r.rank] for row in counts]
        source, target = device_tensor(r, sum(sends), float(r.rank)), device_tensor(r, sum(takes), -1.0)
        r.pg.alltoall_base(target, source, takes, sends, AllToAllOptions()).wait()
        assert contents(r, target).tolist() == [float(s) for s, n in enumerate(takes) for _ in range(n)]

    assert way_of(call) == way


@pytest.mark.parametrize("who, nbytes", [({0, 1, 2}, LIMIT // 32 // 4 * 4), ({0, 1}, LIMIT)], ids=["all", "some"])
def test_where_kernels_of_all_ranks_run_at_once_the_limit_is_lower(who, nbytes):
    def drivers():
        world = World(1)
        made = [FakeDriver(world, r) for r in range(3)]
        for r in who:
            made[r].side_by_side = True
        return {"world": world, "drivers": made}

    assert way_of(all_reduce(nbytes), **drivers()) == "Staged"
    assert way_of(all_reduce(nbytes + 4), **drivers()) == "Shared"


def test_what_goes_in_place_does_not_go_through_host_memory():
    config = {**BY_SIZE, "cuda_in_place_bytes": 1000}
    assert way_of(all_reduce(1000), config=config, in_place=True) == "Staged"
    assert way_of(all_reduce(1004), config=config, in_place=True) == "Shared"
    assert way_of(all_reduce(1004), config=config) == "Staged"


def test_with_no_bytes_allowed_nothing_goes_through_host_memory():
    assert way_of(all_reduce(4), config={**BY_SIZE, "cuda_host_bytes": 0}) == "Shared"


@pytest.mark.parametrize("gpus, way", [("ABB", "Staged"), ("ABC", "Shared")])
def test_ranks_that_share_no_gpu_need_no_host_memory(gpus, way):
    assert way_of(all_reduce(4), gpus=gpus) == way


@pytest.mark.parametrize("gpus, more", [("AAA", 1), ("ABB", 2), ("ABC", 2)])
def test_two_shot_is_for_several_gpus(gpus, more):
    """One-shot has one round, two-shot two."""

    def body(r):
        warm(r)
        shared, rounds = next(iter(r.pg._transport._cuda.values()))._collectives, []
        for nbytes in (256, 256 + 4):
            before = shared.k
            r.pg.allreduce([device_tensor(r, nbytes // 4, 1.0)], options(False))
            rounds.append(shared.k - before)
        return rounds

    assert run_ranks(3, body, config=SHARED, gpus=gpus) == [[1, more]] * 3


def test_one_rank_alone_needs_no_host_memory():
    assert way_of(all_reduce(4), size=1) == "Shared"


def test_the_log_says_it_once(caplog):
    with caplog.at_level(logging.INFO, "c10d_custom"):
        way_of(all_reduce(4))
    said = [m for m in caplog.messages if "in shared mode" in m]
    assert len(said) == 3 and all(m.endswith(f"; up to {LIMIT} bytes through host memory") for m in said)


def test_host_memory_grows_in_steps():
    def body(r):
        warm(r)
        taken, real = [], r.driver.allocate_pinned
        r.driver.allocate_pinned = lambda nbytes: taken.append(nbytes) or real(nbytes)
        for count in (300_000, 350_000, 400_000, 500_000):
            r.pg.allreduce([device_tensor(r, count, 1.0)], options(False))
            r.synchronize()
        return taken

    config = {**BY_SIZE, "cuda_host_bytes": 1 << 22, "cuda_staging_bytes": 1 << 23}
    assert run_ranks(2, body, config=config) == [[1 << 21] * 2] * 2


def test_ranks_on_both_sides_of_the_limit_are_told():
    def body(r):
        warm(r)
        count = (LIMIT + 400 * (r.rank == 2)) // 4
        with pytest.raises(CollectiveMismatchError) as raised:
            r.pg.allreduce([device_tensor(r, count, 1.0)], options(False))
        assert f"[{LIMIT // 4}]" in str(raised.value) and f"[{LIMIT // 4 + 100}]" in str(raised.value), raised.value

    run_ranks(3, body, config=BY_SIZE)
