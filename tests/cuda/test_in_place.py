"""Collectives of ranks that share a GPU, in place: their bits, the bytes they move, and the memory they map."""

from threading import Barrier

import pytest
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions, ReduceScatterOptions

import in_place_ranks as ranks
from c10d_custom.errors import TransportError
from c10d_custom.transport.cuda import in_place
from c10d_custom.transport.cuda.mappings import Allocation, Mappings
from device_tensors import device_tensor, options, warm
from fake_driver import FakeDriver
from fake_world import Buffer, World
from in_place_ranks import LARGE
from thread_ranks import run_ranks

pytestmark = pytest.mark.lane2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_collective_among_those_in_place(size, full):
    seeds = range(9000 * size, 9000 * size + ((100 if size < 5 else 30) if full else (3 if size < 5 else 1)))
    assert sum(ranks.programs(seed, size, seconds=60.0) for seed in seeds) > 0


SCENARIOS = [
    ranks.in_order,
    ranks.views,
    ranks.freed,
    ranks.dropped,
    ranks.in_use,
    ranks.for_a_call_alone,
    ranks.resized,
    ranks.overlapping,
    ranks.more_than_are_kept,
    ranks.told_again,
    ranks.exported_once,
    ranks.cannot_be_exported,
    ranks.beyond_its_segment,
    ranks.cannot_be_opened,
    ranks.kernel_that_does_not_end,
    ranks.closed_with_the_group,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_what_may_become_of_memory(scenario, full):
    for seed in range(20 if full else 2):
        scenario(seed)


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "another"])
def test_a_rank_that_dies_after_it_has_told(who):
    for seed in range(3):
        ranks.gone(seed, who)


@pytest.mark.parametrize("gpus, size", [(["GPU-0", "GPU-1", "GPU-1"], 3), (None, 1), (None, 17)])
def test_ranks_that_it_is_not_for_go_as_before(gpus, size):
    def body(r):
        t = device_tensor(r, LARGE, 1.0)
        assert ranks.summed(r, t) == float(size)
        return ranks.group_of(r)._collectives.peers.in_place

    assert ranks.run(size, body, gpus=gpus, on=False) == [None] * size


class Stale(FakeDriver):
    """Whom opening what lies where something was open gives something else."""

    def open_memory(self, handle):
        address, opened = super().open_memory(handle), getattr(self, "tried", 0)
        if self.maps[address][0].nbytes == in_place._TRIED:
            self.tried = opened + 1
            if opened >= 2:  # beyond the first of each
                self.maps[address][0].importers.discard(self.rank)
                self.maps[address] = (Buffer(self.rank, in_place._TRIED), False)
        return address


class Closed(FakeDriver):
    """Who cannot export what was freed and allocated anew."""

    exported = 0

    def export_memory(self, address):
        self.exported += 1
        if self.exported == 3:
            raise RuntimeError("not again")
        return super().export_memory(address)


@pytest.mark.parametrize(
    "who, kind, why",
    [(0, Stale, "in place of memory that it had freed was not mapped"), (2, Closed, "could not be mapped")],
)
def test_off_where_memory_cannot_be_mapped_again(who, kind, why):
    """As one rank finds in the trial; and all is freed."""

    def body(r):
        t = device_tensor(r, LARGE, 1.0)
        assert ranks.summed(r, t) == 3.0
        return ranks.group_of(r).mode.reason, ranks.group_of(r)._collectives.peers.facts.in_place

    world = World(1)
    drivers = [(kind if r == who else FakeDriver)(world, r) for r in range(3)]
    for reason, on in ranks.run(3, body, on=False, world=world, drivers=drivers):
        assert "no collective is done in place: rank" in reason and why in reason and not on


def test_on_where_the_trial_goes_well():
    def body(r):
        warm(r)
        return ranks.group_of(r)._collectives.peers.facts.in_place, len(r.driver.maps)

    (on, mapped), *others = ranks.run(3, body)
    assert on and mapped == 3 and others == [(True, 3)] * 2  # the staging memory of each, and nothing of the trial


# --- bytes


def moved(op, size, in_place):
    """Bytes that the GPU reads and writes for one call, in units of the larger side of it."""
    part = 64 * 512  # bytes of a part, so that each slice is a multiple of what slices are aligned to
    count = part * size // 4

    def body(r):
        warm(r)
        whole = device_tensor(r, count, 1.0)
        parts = [device_tensor(r, count // size, 1.0) for _ in range(size)]
        one = device_tensor(r, count // size, 1.0)
        r.synchronize()
        begin.wait()
        before = r.world.moved
        begin.wait()
        {
            "all_reduce": lambda: r.pg.allreduce([whole], options(True)),
            "broadcast": lambda: r.pg.broadcast([whole], BroadcastOptions()),
            "all_gather": lambda: r.pg.allgather([parts], [one], AllgatherOptions()),
            "reduce_scatter": lambda: r.pg.reduce_scatter([one], [parts], ReduceScatterOptions()),
        }[op]().wait()
        r.synchronize()
        begin.wait()
        return r.world.moved - before

    begin = Barrier(size, timeout=30)
    results = run_ranks(
        size, body, config={**ranks.SHARED, "cuda_staging_bytes": 1 << 22}, in_place=in_place, laziness=0.0
    )
    assert len(set(results)) == 1
    return results[0] / (part * size)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "op, in_place, staged",
    [
        ("all_reduce", lambda n: 2 * n, lambda n: n * (n + 3)),
        ("broadcast", lambda n: n, lambda n: 2 * n),
        ("all_gather", lambda n: n + 1, lambda n: 2 * n + 2),
        ("reduce_scatter", lambda n: n + 1, lambda n: 3 * n - 1),
    ],
)
def test_bytes_moved(op, in_place, staged, size):
    """The formulas of docs/internals/cost-model.md, for all ranks together."""
    assert moved(op, size, True) == in_place(size)
    assert moved(op, size, False) == staged(size)


# --- mappings of several groups


class Opener:
    """A driver that has only memory of others."""

    def __init__(self):
        self.open, self.addresses = {}, iter(range(1 << 40, 1 << 50, 1 << 20))

    def open_memory(self, handle):
        address = next(self.addresses)
        self.open[address] = handle
        return address

    def close_memory(self, address):
        del self.open[address]


def allocation(number, base=1 << 30, nbytes=100):
    return Allocation(base, nbytes, number)


def test_groups_of_a_process_share_what_is_open():
    driver = Opener()
    mappings = Mappings(driver)
    at = mappings.enter("one", 7, allocation(1), b"a")
    assert mappings.enter("other", 7, allocation(1), b"a") == at
    assert mappings.enter("other", 8, allocation(1), b"b") != at  # another process's
    mappings.leave("one", 7, 1)
    mappings.release("one")
    assert sorted(driver.open.values()) == [b"a", b"b"]
    mappings.release("other")
    assert not driver.open


def test_nothing_is_closed_that_a_call_may_use():
    driver = Opener()
    mappings = Mappings(driver, most=2)
    mappings.enter("one", 7, allocation(1), b"a")
    mappings.forget(7, [1])
    with pytest.raises(TransportError, match="has been freed there"):
        mappings.enter("other", 7, allocation(2, (1 << 30) + 99), b"b")
    mappings.enter("other", 7, allocation(3, 1 << 31), b"c")
    with pytest.raises(TransportError, match="2 at most"):
        mappings.enter("other", 7, allocation(4, 1 << 32), b"d")
    assert list(driver.open.values()) == [b"a", b"c"]
    mappings.leave("one", 7, 1)
    mappings.enter("other", 7, allocation(4, 1 << 32), b"d")  # in place of what was used longest ago
    assert list(driver.open.values()) == [b"c", b"d"]
    mappings.leave("other", 7, 3)
    mappings.enter("other", 7, allocation(3, 1 << 31), b"c")
    mappings.leave("other", 7, 3)
    mappings.leave("other", 7, 4)
    mappings.enter("one", 7, allocation(5, 1 << 33), b"e")
    assert list(driver.open.values()) == [b"c", b"e"]


def test_a_call_that_failed_holds_what_it_used_until_its_group_is_over():
    driver = Opener()
    mappings = Mappings(driver)
    mappings.enter("failed", 7, allocation(1), b"a")
    mappings.enter("other", 7, allocation(1), b"a")
    mappings.leave("other", 7, 1)
    mappings.forget(7, [1])
    mappings.release("other")
    assert driver.open
    mappings.release("failed")
    assert not driver.open
    for group in ("failed", "other"):
        mappings.enter(group, 7, allocation(2), b"b")
    mappings.leave("other", 7, 2)
    mappings.release("failed")  # and no longer than that, though others have it open, too
    mappings.forget(7, [2])
    assert not driver.open
