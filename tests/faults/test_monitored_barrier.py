"""A monitored barrier beside the group's collectives: a rank that calls one of them where others are in the barrier is
a disagreement, told to every rank at once; ranks that come in order, or late, are not."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError
from harness.groups import group_with_timeout

MINUTE = timedelta(seconds=60)
COLLECTIVES = {
    "all_reduce": lambda g: dist.all_reduce(torch.ones(5), group=g),
    "large all_reduce": lambda g: dist.all_reduce(torch.ones(1 << 20), group=g),
    "async broadcast": lambda g: dist.broadcast(torch.ones(5), group=g, group_src=1, async_op=True).wait(),
    "all_gather": lambda g: dist.all_gather([torch.ones(3) for _ in range(g.size())], torch.ones(3), group=g),
}


def instead(name, in_barrier, comes_last):
    """``in_barrier``: those in the barrier; the others call a collective instead."""
    g = dist.new_group()
    if g.rank() == comes_last:
        time.sleep(0.3)
    began = time.monotonic()
    try:
        if g.rank() in in_barrier:
            g.monitored_barrier(MINUTE)
        else:
            COLLECTIVES[name](g)
        wrong = ["nothing was raised"]
    except CollectiveMismatchError as error:
        text = str(error)
        wrong = [
            f"rank {r} is not told of in {text}"
            for r in range(g.size())
            if (f"\n  rank {r}: monitored_barrier #1" in text) != (r in in_barrier) or "has not called" in text
        ]
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if time.monotonic() - began > 20:
        wrong.append(f"told after {time.monotonic() - began:.1f} s")
    dist.destroy_process_group(g)
    return [f"{name}, {in_barrier} in the barrier, {comes_last} last: {w}" for w in wrong]


@pytest.mark.world_sizes(3, 4)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_instead(ranks, name):
    last = ranks.world_size - 1
    for i, in_barrier in enumerate(([0], [last], [*range(1, last + 1)], [*range(last)], [0, last])):
        assert not any(wrong := ranks.run(instead, name, in_barrier, i % (last + 1))), wrong


def one_after_the_other(times):
    g = dist.new_group()
    total = torch.zeros(1)
    for i in range(times):
        work = dist.all_reduce(torch.ones(1000), group=g, async_op=True)
        g.monitored_barrier(MINUTE)
        if i % 5 == g.rank():
            time.sleep(0.06)
        dist.all_reduce(total.fill_(1), group=g)
        work.wait()
    dist.destroy_process_group(g)
    return int(total)


def test_who_is_let_go_calls_the_next_collective_while_others_are_still_in_it(ranks):
    assert ranks.run(one_after_the_other, 30) == [ranks.world_size] * ranks.world_size


def late(seconds):
    """The last rank comes when the others have given up, and wait for it in a collective."""
    g = group_with_timeout(timedelta(seconds=30))
    is_late = g.rank() == g.size() - 1
    if is_late:
        time.sleep(seconds + 0.5)
    began = time.monotonic()
    try:
        g.monitored_barrier(MINUTE if is_late else timedelta(seconds=seconds))
        wrong = ["passed"]
    except CollectiveTimeoutError as error:
        wrong = [] if f"Rank {g.size() - 1}" in str(error) or g.rank() else [str(error)]
    if is_late and time.monotonic() - began > 20:
        wrong.append("was not told that the others have given up")
    t = torch.ones(1)
    dist.all_reduce(t, group=g)
    dist.destroy_process_group(g)
    return wrong + [f"all_reduce: {t}"] * (t.item() != g.size())


@pytest.mark.world_sizes(3, 4)
def test_who_comes_late_is_told_and_the_group_goes_on(ranks):
    assert not any(wrong := ranks.run(late, 0.5)), wrong


def in_modes():
    g = dist.new_group()
    with torch.device("meta"):
        g.monitored_barrier(MINUTE)
    with FakeTensorMode():
        g.monitored_barrier(MINUTE)
    dist.destroy_process_group(g)


@pytest.mark.world_sizes(2)
def test_modes_that_make_other_tensors(ranks):
    ranks.run(in_modes)
