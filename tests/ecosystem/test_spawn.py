"""The runner itself: what it says about a rank that raises, hangs or dies, and that none is left."""

import multiprocessing
import os
import time

import pytest

from harness import Layout

from .spawn import RanksFailed, run

pytestmark = pytest.mark.skipif(Layout.chosen() is not None, reason="--job: these look at spawned processes")


def misbehave(rank, size, how):
    if rank == 1:
        if how == "raise":
            raise KeyError("wrong on purpose")
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(100)
    return os.getpid()


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_values_are_returned_by_rank():
    pids = run(misbehave, 1, None, init=False)
    assert len(set(pids)) == 1 and alive(pids) == pids


@pytest.mark.parametrize(
    "how,message,deadline",
    [
        ("raise", r"(?s)rank 0 ended well.*rank 1 failed:.*KeyError: 'wrong on purpose'", 60),
        ("exit", r"(?s)rank 1 failed:\s+died with exit code 7", 60),
        ("hang", r"(?s)rank 0 ended well.*rank 1 had not ended; its stacks:.*in misbehave", 2),
    ],
    ids=["raise", "exit", "hang"],
)
def test_failures_are_told(how, message, deadline):
    run(misbehave, 2, None, init=False)  # the processes are there before the deadline runs
    before = {p.pid for p in multiprocessing.active_children()}
    with pytest.raises(RanksFailed, match=message):
        run(misbehave, 2, how, init=False, deadline=deadline)
    gone = before - {p.pid for p in multiprocessing.active_children()}
    assert len(gone) == 2 and not alive(gone)
