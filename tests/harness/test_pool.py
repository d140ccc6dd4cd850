"""The pool itself: a case that hangs, raises or dies is told apart, and the next case still runs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from harness import RankFailure, RankPool


@pytest.fixture
def pool(backend):
    pool = RankPool(2, backend)
    yield pool
    processes = _processes(pool)
    wrong = pool.close()
    assert not wrong, wrong
    assert not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]


def _processes(pool):
    return [process.pid for process in pool._processes]


def _sum(value):
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item()


def _hang_in_rank_1():
    if dist.get_rank() == 1:
        time.sleep(1000)


def _raise_in_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("of rank 1")
    dist.barrier()


def _die_in_rank_1():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _unpicklable():
    return lambda: None


def test_processes_are_kept(pool):
    assert pool.run(_sum, 1) == [3, 3]
    processes = _processes(pool)
    assert pool.run(_sum, 5) == [15, 15]
    assert _processes(pool) == processes


@pytest.mark.parametrize(
    "function, words",
    [
        (_hang_in_rank_1, ["--- rank 1: no answer", "_hang_in_rank_1"]),
        (_raise_in_rank_1, ["KeyError: 'of rank 1'"]),
        (_die_in_rank_1, ["--- rank 1: died, exit code -9"]),
        (_unpicklable, ["rank 0, 1", "_unpicklable"]),
    ],
)
def test_after_a_failure(pool, function, words):
    pool.run(_sum, 1)
    processes = _processes(pool)
    with pytest.raises(RankFailure) as failure:
        pool.run(function, timeout=3)
    if function is _die_in_rank_1 and pool.layout:
        words = ["1: died, exit code"]  # the launcher ends all ranks, and has but one exit code
    for word in words:
        assert word in str(failure.value)
    assert not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]
    assert pool.run(_sum, 1) == [3, 3]
