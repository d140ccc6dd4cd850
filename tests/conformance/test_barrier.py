import inspect
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from .cases import Signal, check
from .cases import group as make_group


def _waits_for_all(members, late, async_op):
    """Nobody leaves before the last has come. `late` is the position of the rank that comes last."""
    g = make_group(members)
    arrived = Signal()
    if g.me is None:
        return []
    if g.me == late % g.size:
        time.sleep(0.1)
    arrived.give()
    work = dist.barrier(g.pg, async_op=async_op)
    if async_op:
        work.wait()
    count = arrived.given()
    return [] if count == g.size else [f"left the barrier when {count} of {g.size} had come"]


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("members", ["world", "unsorted"])
def test_waits_for_all(ranks, members, async_op):
    for late in range(ranks.world_size):
        check(ranks, _waits_for_all, members, late, async_op)


def _many(count):
    for i in range(count):
        dist.barrier()
    works = [dist.barrier(async_op=True) for _ in range(count)]
    for work in reversed(works):
        work.wait()
    return []


def test_many(ranks):
    check(ranks, _many, 50)


def _monitored_passes():
    g = make_group()
    for wait_all_ranks in (False, True):
        # dist.monitored_barrier itself refuses every backend but gloo.
        g.pg.monitored_barrier(timedelta(seconds=20), wait_all_ranks=wait_all_ranks)
    return []


def test_monitored_passes(ranks):
    check(ranks, _monitored_passes)


def _monitored_names(absent, wait_all_ranks):
    """Made on a group of its own: afterwards that group is good for nothing."""
    pg = dist.new_group(list(range(dist.get_world_size())))
    done = Signal()
    wrong = []
    if dist.get_rank() in absent:
        done.wait(dist.get_world_size() - len(absent))
    else:
        started = time.monotonic()
        try:
            pg.monitored_barrier(timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
            wrong.append("passed without all ranks")
        except RuntimeError as error:
            named = [rank for rank in absent if str(rank) in str(error)]
            if dist.get_rank() == 0 and not (named == absent if wait_all_ranks else named):
                wrong.append(f"does not name the absent {absent}: {error}")
        if time.monotonic() - started > 15:
            wrong.append(f"took {time.monotonic() - started:.1f} s to notice")
        done.give()
    dist.destroy_process_group(pg)
    return wrong


@pytest.mark.world_sizes(4)
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_monitored_names_the_absent(ranks, wait_all_ranks):
    check(ranks, _monitored_names, [2, 3], wait_all_ranks)


def _deadline():
    pg = dist.new_group(list(range(dist.get_world_size())))
    done = Signal()
    wrong = []
    if dist.get_rank() == 0:
        started = time.monotonic()
        try:
            dist.barrier(pg, timeout=timedelta(seconds=1))
            wrong.append("passed without rank 1")
        except RuntimeError:
            pass
        if not 0.9 < time.monotonic() - started < 15:
            wrong.append(f"gave up after {time.monotonic() - started:.1f} s instead of 1 s")
        done.give()
    else:
        done.wait()
    dist.destroy_process_group(pg)
    return wrong


@pytest.mark.skipif(
    "timeout" not in inspect.signature(dist.barrier).parameters, reason="torch 2.11's barrier takes no time-out"
)
@pytest.mark.world_sizes(2, 4)
def test_deadline_of_the_call(ranks):
    check(ranks, _deadline)
