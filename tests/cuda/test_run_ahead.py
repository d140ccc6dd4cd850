"""Fused collectives, in which no host waits for another: a rank is amid later calls while others have not begun the
first; and what becomes of ranks that call different things, come late, or have left."""

import re
import threading
import time

import pytest
import torch
from torch.distributed import ReduceOp

from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError, CustomBackendError, PeerLostError
from c10d_custom.transport.cuda import transport as cuda_transport
from device_tensors import device_tensor, options, warm
from fused_ranks import OPS, Asked, run, transport_of
from thread_ranks import cpu_tensors

pytestmark = pytest.mark.lane2

AHEAD = 31  # calls that a rank can be ahead of another: kCallsAhead of backend/shm/layout.h, less one
each_op = pytest.mark.parametrize("op", OPS)


@each_op
def test_a_rank_is_done_with_its_calls_before_others_begin(op):
    ahead = threading.Event()

    def body(r):
        warm(r)
        made = [Asked(r, op, count) for count in (1, 1000, 20_000) * 6]
        before, kernels = r.cpu.calls, len(r.driver.fused.launched)
        assert r.rank == 0 or ahead.wait(30)
        for asked in made:
            asked.call()
        ahead.set()
        assert r.cpu.calls == before, "the hosts have met"
        assert len(r.driver.fused.launched) - kernels >= len(made)
        return all(asked.is_right() for asked in made)

    for seed in range(2):
        ahead.clear()
        assert run(3, body, seed=seed) == [True] * 3


def test_a_rank_waits_for_one_that_is_many_calls_behind():
    seen = []

    def body(r):
        warm(r)
        before = r.cpu.next_sequence()
        if r.rank == 1:
            until = time.monotonic() + 20
            while r.cpu.states(0)[0].arrived < before + AHEAD - 1 and time.monotonic() < until:
                time.sleep(1e-3)
            time.sleep(0.2)
            seen.append(r.cpu.states(0)[0].arrived - (before - 1))
        made = [Asked(r, "all_reduce", 10) for _ in range(3 * AHEAD)]
        for asked in made:
            asked.call()
        return all(asked.is_right() for asked in made)

    assert run(2, body) == [True] * 2 and seen == [AHEAD]


def test_fused_calls_among_others_and_those_of_the_cpu():
    """Whose ranks meet: what they use again must be free by then."""

    def body(r):
        warm(r)
        right = []
        for step in range(20):
            time.sleep(2e-3 * ((step + r.rank) % 3))
            asked = Asked(r, list(OPS)[step % 4], 300)
            asked.call()
            right.append(asked)
            if step % 3 == 0:
                with cpu_tensors():
                    t = torch.full((5,), 1.0 + r.rank)
                    r.pg.allreduce([t], options(False))
                    assert t.tolist() == [6.0] * 5
            if step % 5 == 0:
                t = device_tensor(r, 10, 1.0)
                r.pg.reduce([t])
        return all(asked.is_right() for asked in right)

    for seed in range(3):
        assert run(3, body, seed=seed) == [True] * 3


# --- ranks that disagree


def largest(r):
    o = options(False)
    o.reduceOp = ReduceOp.MAX
    r.pg.allreduce([device_tensor(r, 10, 1.0)], o)


def of_the_cpu(r):
    with cpu_tensors():
        r.pg.allreduce([torch.ones(10)], options(False))


DIFFERENT = {
    "count": lambda r: r.pg.allreduce([device_tensor(r, 11, 1.0)], options(False)),
    "dtype": lambda r: r.pg.allreduce([device_tensor(r, 10, 1.0, torch.int32)], options(False)),
    "redop": largest,
    "op, root": lambda r: Asked(r, "broadcast", 10).call(),
    "op": lambda r: Asked(r, "all_gather", 10).call(),
    "device, op": lambda r: r.pg.barrier(),
    "device": of_the_cpu,
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("fields", DIFFERENT)
def test_ranks_that_call_different_things(fields, first):
    """The ranks other than 1 call all_reduce, and rank 1 something else, before them or after."""
    begun = threading.Event()

    def body(r):
        warm(r)
        mine = r.rank == 1
        if mine != (first == 1):
            assert begun.wait(20)
        else:
            threading.Timer(0.1, begun.set).start()
        with pytest.raises(CustomBackendError) as raised:
            if mine:
                DIFFERENT[fields](r)
            work = r.pg.allreduce([device_tensor(r, 10, 1.0)], options(True, 30.0))
            work.wait()
            r.synchronize(20.0)
            work.is_completed()
        return type(raised.value), str(raised.value)

    for rank, (kind, text) in enumerate(run(3, body, clean=False)):
        if rank == 1 and kind is not CollectiveMismatchError:  # it has made its call, and hears at the next
            assert "was not called alike on all ranks" in text, text
            continue
        said = text.partition("they differ in ")[2].partition(":")[0].split(", ")
        assert kind is CollectiveMismatchError and {*fields.split(", ")} <= {*said}, (rank, text)
        assert "rank 1: " in text and "rank 0: all_reduce #" in text, text


def test_calls_in_another_order():
    def body(r):
        warm(r)
        both = [Asked(r, op, 10) for op in ("all_reduce", "all_gather")]
        with pytest.raises(CustomBackendError) as raised:
            works = [asked.call(True) for asked in (both if r.rank else both[::-1])]
            for work in works:
                work.wait()
            r.synchronize(20.0)
            for work in works:
                work.is_completed()
        return str(raised.value)

    assert all("they differ in op" in text or "not called alike" in text for text in run(2, body, clean=False))


# --- ranks that do not come


def test_the_error_of_a_late_rank_says_what_it_does():
    gate = threading.Event()

    def body(r):
        warm(r)
        if r.rank == 1:
            assert gate.wait(20)
            return None
        work = r.pg.allreduce([device_tensor(r, 10, 1.0)], options(True, 0.5))
        work.wait()
        r.synchronize(20.0)
        with pytest.raises(CollectiveTimeoutError) as raised:
            work.is_completed()
        gate.set()
        return str(raised.value)

    text = run(2, body, clean=False)[0]
    found = re.search(
        r"all_reduce #(\d+) of group test, rank 0: Timed out on the GPU: the stream of rank 1 did not", text
    )
    assert found and f"come to collective #{found[1]} in its time (it last entered all_reduce #" in text, text


@pytest.mark.parametrize("before", [False, True])
def test_a_rank_that_has_left_without_a_call(before):
    """It has left before the others call, or after."""
    called = threading.Event()

    def body(r):
        warm(r)
        if r.rank == 1:
            assert before or called.wait(20)
            return None
        if before:
            until = time.monotonic() + 20
            while r.cpu.states(0)[1].state != 2 and time.monotonic() < until:
                time.sleep(1e-3)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1 has left the group"):
            work = r.pg.allreduce([device_tensor(r, 10, 1.0)], options(True, 60.0))
            work.wait()
            called.set()
            r.synchronize(20.0)
            work.is_completed()
        return time.monotonic() - began

    assert run(2, body, clean=False)[0] < 20


def test_a_rank_leaves_only_once_others_have_come_to_its_calls(monkeypatch):
    monkeypatch.setattr(cuda_transport, "_DRAIN", 0.1)
    leaves = threading.Event()

    def body(r):
        warm(r)
        asked = Asked(r, "all_reduce", 1000)
        if r.rank == 1:
            assert leaves.wait(20)
            time.sleep(0.5)
        asked.call()
        if r.rank == 0:
            leaves.set()
            return asked.taken
        assert asked.is_right()
        return asked.taken

    assert [t.unique().tolist() for t in run(2, body, clean=False)] == [[3.0]] * 2


def test_a_call_on_a_group_that_was_aborted():
    def body(r):
        warm(r)
        r.world.barrier(r.size)
        r.pg.abort()
        kernels = len(r.driver.fused.launched)
        with pytest.raises(CustomBackendError):
            Asked(r, "all_gather", 10).call()
        assert len(r.driver.fused.launched) == kernels and transport_of(r).mode.name == "p2p"

    run(2, body, clean=False)


@each_op
def test_each_can_be_captured(op):
    def body(r):
        warm(r)
        asked = Asked(r, op, 5000)
        asked.call()
        r.synchronize()
        r.driver.is_capturing = True
        asked.call()
        r.driver.is_capturing = False
        assert len(r.driver.graph) == len(r.driver.fused.launched[-len(r.driver.graph) :]) > 0
        for value in (2.0, 3.0):
            r.fill(asked.given, torch.full_like(asked.given, value + r.rank))
            r.driver.replay()
            got = []
            r.read(asked.taken, got)
            r.synchronize()
            ranks = [value + q for q in range(r.size)]
            want = ranks if op == "all_gather" else [ranks[0]] if op == "broadcast" else [sum(ranks)]
            assert got[0].unique().tolist() == want
        return True

    assert run(3, body) == [True] * 3
