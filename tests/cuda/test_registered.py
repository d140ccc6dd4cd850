"""Tensors on simulated GPUs that fused kernels read where they lie (c10d_custom.empty)."""

import gc
from unittest import mock

import pytest
import torch

from c10d_custom.c10d.allocation import on_gpu
from c10d_custom.errors import CollectiveMismatchError, CustomBackendError, TransportError, UsageError
from c10d_custom.transport.cuda import algorithm
from device_tensors import options
from fused_ranks import _OPTIONS as OPTIONS
from fused_ranks import OPS, P2P, gpus, run, transport_of
from thread_ranks import run_ranks

pytestmark = pytest.mark.lane2

GPU = torch.device("cuda", 0)
COUNT = 5000  # floats; staged, they would take several kernels


@pytest.fixture(autouse=True)
def from_4_kib_on(monkeypatch):
    monkeypatch.setattr(algorithm, "one_shot_bytes", lambda ranks: 4096)


def made(r, count):
    return on_gpu(r.pg, count * 4, torch.float32, GPU)


def queue(r, run, reads=(), writes=()):
    with r.driver.activate():
        r.driver.user(r.driver.current_stream(), run, reads=reads, writes=writes)


def contents(r, tensor):
    got = []
    queue(r, lambda: got.append(tensor.clone()), reads=[tensor])
    r.synchronize()
    return got[0]


class Asked:
    """A collective, of which rank r gives `value` + r. ``in_place``: an all_gather's input is a part of its output."""

    def __init__(self, r, op, in_place=False):
        n, self.r, self.op = r.size, r, op
        self.given = self.taken = made(r, COUNT * (n if in_place or op == "reduce_scatter" else 1))
        if in_place:
            self.given = self.taken[r.rank * COUNT : (r.rank + 1) * COUNT]
        elif op in ("all_gather", "reduce_scatter"):
            self.taken = torch.zeros(COUNT * n if op == "all_gather" else COUNT)

    def call(self, value):
        given, fill = self.given, value + self.r.rank
        queue(self.r, lambda: given.fill_(fill), writes=[given])
        o = options(False) if self.op == "all_reduce" else OPTIONS[self.op]()
        o.asyncOp = False
        OPS[self.op](self.r, self.given, self.taken, o)

    def is_right(self, value):
        n, got = self.r.size, contents(self.r, self.taken)
        if self.op == "all_gather":
            return torch.equal(got, torch.arange(value, value + n).repeat_interleave(COUNT))
        return bool((got == (value if self.op == "broadcast" else n * value + n * (n - 1) / 2)).all())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op, in_place", [*((op, False) for op in OPS), ("all_gather", True)])
def test_they_are_read_where_they_lie(op, in_place, size):
    for seed in range(3):
        one_op(op, in_place, size, seed)


def one_op(op, in_place, size, seed, **more):
    def body(r):
        asked = Asked(r, op, in_place)
        for value in (1.0, 5.0, 9.0):
            before, met = len(r.driver.fused.launched), r.cpu.calls
            asked.call(value)
            assert len(r.driver.fused.launched) == before + 1  # and no second one, as no halves are filled
            assert r.cpu.calls == met, "the hosts have met"
            assert asked.is_right(value)
        return r.driver.fused.halves[-1]

    assert run(size, body, seed=seed, **more) == [0] * size


def every_op(seed, size, steps, config, seconds):
    """For test_mutations.py."""
    with mock.patch.object(algorithm, "one_shot_bytes", lambda ranks: 4096):
        for op in OPS:
            one_op(op, False, size, seed, seconds=seconds)


def different_tensors(seed, size, steps, config, seconds):
    with mock.patch.object(algorithm, "one_shot_bytes", lambda ranks: 4096):
        test_ranks_that_give_other_tensors_hear_of_it("another")


def test_a_graph_holds_such_a_call():
    def body(r):
        asked = Asked(r, "all_reduce")
        asked.call(1.0)
        given = asked.given
        r.synchronize()
        r.world.barrier(2)
        r.driver.is_capturing = True
        r.pg.allreduce([given], options(False))
        r.driver.is_capturing = False
        for value in (2.0, 3.0):
            queue(r, lambda value=value: given.fill_(value), writes=[given])
            r.driver.replay()
            assert contents(r, given).unique().tolist() == [2 * value]
        return r.driver.fused.halves[-1]

    assert run(2, body, clean=False) == [0, 0]


@pytest.mark.parametrize("what", ["another", "a view elsewhere", "an ordinary one"])
def test_ranks_that_give_other_tensors_hear_of_it(what):
    def body(r):
        tensors = made(r, COUNT), made(r, COUNT)
        t = {
            "another": tensors[r.rank],
            "a view elsewhere": tensors[0][4 * r.rank :][: COUNT - 4],
            "an ordinary one": tensors[0] if r.rank else torch.zeros(COUNT),
        }[what]
        with pytest.raises(CustomBackendError) as found:
            r.pg.allreduce([t], options(True)).wait()
            r.synchronize()
            r.pg.allreduce([t], options(False))
        return found.value

    errors = run(2, body, clean=False, may_race=True)
    assert any(isinstance(e, CollectiveMismatchError) and "c10d_custom.empty" in str(e) for e in errors), errors


@pytest.mark.parametrize("step", ["allocate", "export_memory", "open_memory"])
def test_what_one_rank_cannot_do_all_hear_of(step):
    def body(r):
        r.pg.connect(GPU)
        if r.rank == 1:
            r.driver.fails[step] = RuntimeError("out of luck")
        with pytest.raises(TransportError, match="memory that all reach: rank 1: .*out of luck"):
            r.pg.registered(GPU, 4 * COUNT)
        asked = Asked(r, "all_reduce")
        asked.call(1.0)
        return asked.is_right(1.0)

    assert run(3, body) == [True] * 3


def test_ranks_that_ask_for_different_sizes_all_hear_of_it():
    def body(r):
        with pytest.raises(UsageError, match="rank 0: 400, rank 1: 404"):
            r.pg.registered(GPU, 400 + 4 * r.rank)
        return made(r, 100).numel()

    assert run(2, body) == [100, 100]


@pytest.mark.parametrize("size, mode", [(1, "p2p"), (2, "shared"), (2, "staged")])
def test_where_no_kernels_are_fused_there_are_none(size, mode):
    def body(r):
        return r.pg.registered(GPU, 400)

    assert run_ranks(size, body, config={"cuda_mode": mode}, gpus=gpus(size)) == [None] * size


def test_memory_stays_as_long_as_there_are_tensors_and_the_group():
    worlds = []

    def body(r):
        worlds.append(r.world)
        kept, dropped = made(r, COUNT), made(r, COUNT)
        del dropped
        gc.collect()
        assert len([b for b in r.world.buffers.values() if b.owner == r.rank and not b.freed]) == 3  # staging, and both
        return kept[10:]

    views = run(2, body, clean=False)
    assert len(worlds[0].leaks()) == 2
    views.clear()
    gc.collect()
    assert not worlds[0].leaks()


def test_short_tensors_go_as_ever():
    def body(r):
        t = made(r, 1024)
        queue(r, lambda: t.fill_(1.0), writes=[t])
        r.pg.allreduce([t], options(False))
        return contents(r, t).unique().tolist(), r.driver.fused.halves[-1] > 0, transport_of(r).mode.name

    assert run(2, body, config=P2P, clean=False) == [([2.0], True, "p2p")] * 2
