"""From when time-outs run: a collective's from its turn, a message's from when somebody waits for it."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveTimeoutError, CustomBackendError
from harness.groups import group_with_timeout

SECONDS, APART, HUNG = 1.0, 0.3, 20.0


def first_and_last(function, *args):
    """The group of the first and the last rank, where that runs function(group, place, *args)."""
    group = dist.new_group([0, dist.get_world_size() - 1], timeout=timedelta(seconds=60))
    found = None
    if (rank := dist.get_rank()) in (0, dist.get_world_size() - 1):
        dist.barrier(group)
        group.set_timeout(timedelta(seconds=SECONDS))
        found = function(group, int(rank > 0), *args)
    dist.barrier()
    return found


def timed_out(call):
    """(seconds, those that the error says, its text) of a call that has to time out."""
    began = time.monotonic()
    try:
        call()
    except CollectiveTimeoutError as error:
        said = re.search(r"Timed out after ([\d.]+) s", str(error))
        return time.monotonic() - began, float(said[1]) if said else None, str(error)
    raise AssertionError("nothing was raised")


def wrong_times(found, who):
    seconds, said, text = found
    fits = SECONDS - 0.1 < seconds < HUNG and said is not None and SECONDS <= said <= seconds + 0.1
    return [] if fits and who in text else [f"after {seconds:.3f} s: {text}"]


def queued(count, calls):
    """All issue as many calls at once as take longer than the time-out together; the last rank, one after the other."""
    group = group_with_timeout(timedelta(seconds=60))
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=SECONDS))
    last = dist.get_rank() == dist.get_world_size() - 1
    wrong, tensors, works = [], [torch.ones(count) for _ in range(calls + 2)], []
    for tensor in tensors[: calls if last else None]:
        if last:
            time.sleep(APART)
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    turn = time.monotonic()
    for tensor, work in zip(tensors[:calls], works):
        work.wait()
        turn = time.monotonic()
        if not torch.equal(tensor, torch.full((count,), float(dist.get_world_size()))):
            wrong.append("a wrong sum")
    if not last:  # it never comes to the next one
        late, behind = works[calls:]
        seconds, said, text = timed_out(late.wait)
        # Another rank's time may have been over first.
        if "(found by" not in text:
            wrong += wrong_times((seconds, said, text), f"Missing: rank {dist.get_world_size() - 1}")
        try:
            behind.wait()
            wrong.append("what was behind it came to an end")
        except CustomBackendError as error:
            if f"its collective #{calls + 2} timed out" not in str(error):
                wrong.append(str(error))
        if time.monotonic() - turn > HUNG:
            wrong.append(f"{time.monotonic() - turn:.1f} s")
    dist.barrier()
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.world_sizes(2, 3)
@pytest.mark.parametrize("count", [4, 1 << 16], ids=["small", "large"])
def test_a_queued_collective_has_its_time_from_its_turn_on(ranks, count):
    assert not any(found := ranks.run(queued, count, 5)), found


def posted_early(group, place, kind):
    tensor = torch.zeros(1 << 18)
    if place == 0:
        work = (
            dist.irecv(tensor, group=group, group_src=1)
            if kind == "recv"
            else dist.isend(tensor + 2, group=group, group_dst=1)
        )
        time.sleep(2 * SECONDS)
        dist.isend(torch.ones(1), group=group, group_dst=1, tag=9).wait()  # others pass it meanwhile
        work.wait()
    else:
        time.sleep(1.5 * SECONDS)
        early = dist.irecv(torch.ones(1), group=group, group_src=0, tag=9)
        early.wait()
        if kind == "recv":
            dist.isend(tensor + 2, group=group, group_dst=0).wait()
        else:
            dist.recv(tensor, group=group, group_src=0)
    return [] if kind == "recv" and place or kind == "send" and not place or tensor.eq(2).all() else ["wrong"]


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("kind", ["recv", "send"])
def test_a_message_posted_early_is_waited_for_later(ranks, kind):
    assert not any(found := ranks.run(first_and_last, posted_early, kind)), found


def awaited(group, place, how):
    """Nobody sends: whoever asks for the receive, in whatever way, is told in time."""
    if place:
        return []
    work = dist.irecv(torch.zeros(3), group=group, group_src=1)
    time.sleep(1.5 * SECONDS)

    def wait():
        if how == "polled":
            until = time.monotonic() + HUNG
            while not work.is_completed() and time.monotonic() < until:
                time.sleep(0.01)
        elif how == "future":
            try:
                work.get_future().wait()
            except RuntimeError:
                pass
        elif how == "several":
            others = [dist.P2POp(dist.irecv, torch.zeros(3), group=group, group_peer=1) for _ in range(2)]
            begun = dist.batch_isend_irecv(others)
            for each in (work, *begun):
                each.is_completed()
            for each in begun:
                timed_out(each.wait)
        work.wait()

    found = timed_out(wait)
    if found[0] > SECONDS * 1.9 + 5:
        return [f"after {found[0]:.3f} s"]
    return wrong_times(found, "Did rank 1")


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("how", ["wait", "polled", "future", "several"])
def test_the_time_of_a_message_runs_from_the_first_who_asks(ranks, how):
    assert not any(found := ranks.run(first_and_last, awaited, how)), found


def nobody_waits(group, place):
    """It keeps nobody waiting, neither the group nor its end."""
    works = [dist.irecv(torch.zeros(3), group=group, group_src=1 - place, tag=7)]
    works += [dist.isend(torch.zeros(1 << 18), group=group, group_dst=1 - place, tag=8)]
    time.sleep(1.5 * SECONDS)
    group.set_timeout(timedelta(seconds=60))
    total = torch.ones(3)
    for _ in range(20):  # each looks whether one is over, and is not who waits for it
        dist.all_reduce(total, group=group, async_op=True).wait()
    dist.barrier(group)
    over = [work.has_ended() for work in works]
    began = time.monotonic()
    dist.destroy_process_group(group)
    seconds = time.monotonic() - began
    # Between hosts MPI may have all of the send.
    return [] if not over[0] and seconds < HUNG else [over, seconds]


@pytest.mark.world_sizes(2)
def test_what_nobody_waits_for_keeps_nobody_waiting(ranks):
    assert not any(found := ranks.run(first_and_last, nobody_waits)), found
