"""Signal handlers that end the group whose operations they interrupt, at random points. On one host and, with --job,
over hosts."""

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CustomBackendError
from ecosystem.spawn import run
from faults.test_interrupted import handler_after
from harness import Layout

SECONDS = timedelta(seconds=20)


def destroyed(rank, size, seed, trials):
    """Rank 0's handler destroys the group amid asynchronous operations with futures. Nothing waits longer than the
    errors take."""
    chance, other, slowest, outcomes = random.Random(seed), dist.new_group(timeout=SECONDS), 0.0, {}
    for trial in range(trials):
        group, gone = dist.new_group(timeout=SECONDS), []
        large = trial % 4 == 3
        delay = chance.uniform(1e-4, 6e-3)

        def end(*_):
            gone.append(True)
            dist.destroy_process_group(group)

        def calls():
            for i in range(1000):
                t = torch.ones(200_000 if large else 3)
                work = dist.all_reduce(t, group=group, async_op=True)
                future = work.get_future()
                if i % 3 == 2:
                    future = future.then(lambda done: done.value())
                if i % 2:
                    future.wait()
                work.wait()
                future.wait()
                assert t[0] == size

        began, outcome = time.monotonic(), "all"
        try:
            if rank == 0:
                with handler_after(delay, end):
                    calls()
            else:
                calls()
        except (CustomBackendError, RuntimeError, ValueError) as error:
            # ValueError: torch's, of a group that is no longer one. RuntimeError: what a failed future says.
            outcome = type(error).__name__
        slowest = max(slowest, time.monotonic() - began)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        dist.barrier(other)
        if not gone:
            dist.destroy_process_group(group)
    return slowest, outcomes


@pytest.mark.timeout(600)
def test_destroyed_amid_futures():
    trials = 20 if Layout.chosen() else 60
    for slowest, outcomes in run(destroyed, 2, 2026, trials, deadline=300):
        assert slowest < 10 and sum(outcomes.values()) == trials, (slowest, outcomes)


def used_afterwards(rank, size):
    """Asynchronous operations of a group that was destroyed fail; they do not wait for ever."""
    group, found = dist.new_group(timeout=SECONDS), []
    dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)
    opts = dist.AllreduceOptions()
    opts.asyncOp = True
    for wait in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        began = time.monotonic()
        with pytest.raises((CustomBackendError, RuntimeError), match="abort|closed|destroyed"):
            wait(group.allreduce([torch.ones(3)], opts))
        found.append(time.monotonic() - began)
    return max(found)


def test_a_destroyed_group_waits_for_nothing():
    assert max(run(used_afterwards, 2)) < 5
