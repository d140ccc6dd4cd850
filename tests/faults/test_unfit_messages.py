"""Messages that do not fit their receives: both sides are told, nothing is written, and the group goes on. Over hosts
MPI may have all of a send before its receive is posted; its rank is then told by its next call."""

import time

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveMismatchError

from .operations import LONG, SMALL, Arena
from .test_disagreement import outcome

EAGER = 16 << 10  # bytes: what is sent without a word of the receiver
SECONDS = 10.0  # in which a refusal is here, on a busy machine, too


def pair():
    """A group of the first and the last rank, on two hosts where there are two; None on other ranks."""
    group = dist.new_group([0, dist.get_world_size() - 1])
    return group if group is not dist.GroupMember.NON_GROUP_MEMBER else None


def over_hosts(group):
    return hasattr(group.cpu_transport, "link")


def told_later(call):
    """The error of a message before, that ``call``, made again and again, raises at last; else None."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            call()
        except CollectiveMismatchError as error:
            return error
        time.sleep(1e-3)
    return None


def mentions(error, sent, received, tag):
    """What should be in a text, and is not. ``sent``, ``received``: (elements, dtype)"""
    pieces = [f"{n * dtype.itemsize} bytes of {str(dtype)[6:]}" for n, dtype in (sent, received)]
    pieces += [f"tag {tag}", "rank 0", "rank 1"]
    return [f"{piece} not in: {error}" for piece in pieces if piece not in str(error)]


def unfit(group, sent, received, receive_first, any_source, tag):
    """Rank 0 sends, rank 1 receives something else; (elements, dtype) each."""
    rank, arena, error = group.rank(), Arena(), None
    mine = arena.tensor(*(sent if rank == 0 else received))
    dist.barrier(group)
    if receive_first == (rank == 0):
        time.sleep(0.05)
    if rank == 0:
        error, _, problem = outcome(
            lambda: dist.isend(mine, tag=tag, group=group, group_dst=1), CollectiveMismatchError
        )
        if sent[0] * sent[1].itemsize <= EAGER:  # over before it can be refused
            wrong = [f"the sender: {error}"] if error else []
            error = None
        elif error is None and over_hosts(group):
            error = told_later(lambda: dist.send(torch.ones(1), tag=77, group=group, group_dst=1))
            wrong = [] if error is not None else ["the sender was not told"]
            wrong += [] if "this later call raises its error" in str(error) else [f"not said that it is late: {error}"]
        else:
            wrong = [f"the sender: {problem}"] if problem else []
    else:
        post = {"group_src": None if any_source else 0}
        error, _, problem = outcome(lambda: dist.irecv(mine, tag=tag, group=group, **post), CollectiveMismatchError)
        wrong = [f"the receiver: {problem}"] if problem else []
    if error is not None and not wrong:
        wrong += mentions(error, sent, received, tag)
    wrong += arena.written()
    fits = torch.full((5,), 7.0 if rank == 0 else 0.0)  # the group goes on
    if rank == 0:
        dist.send(fits, tag=tag, group=group, group_dst=1)
    else:
        dist.recv(fits, tag=tag, group=group, group_src=0)
        if fits.tolist() != [7.0] * 5:
            wrong.append(f"the next message: {fits}")
    return wrong


def unfit_cases(cases):
    group = pair()
    return [] if group is None else [wrong for case in cases if (wrong := [str(case), *unfit(group, *case)])[1:]]


@pytest.mark.world_sizes(2, 4)
def test_a_message_that_does_not_fit(ranks):
    float32, int32, float64 = torch.float32, torch.int32, torch.float64
    shapes = [
        ((SMALL, float32), (SMALL + 1, float32)),
        ((SMALL + 1, float32), (SMALL, float32)),
        ((SMALL, float32), (SMALL, int32)),
        ((LONG, float32), (LONG - 1, float32)),
        ((LONG, float32), (LONG, int32)),
        ((LONG, float32), (LONG // 2, float64)),
        ((LONG, float32), (SMALL, float32)),
        ((SMALL, float32), (LONG, float32)),
    ]
    cases = [
        (*shape, first, any_source, 3 * first + any_source)
        for shape in shapes
        for first in (False, True)
        for any_source in (False, True)
    ]
    assert not any(found := ranks.run(unfit_cases, cases)), [f for f in found if f]


# --- over hosts: who is told later, and by what

COUNT = 5000  # elements: above EAGER, and nothing that MPI waits for the receiver with


def refused(group, side, tags):
    """Rank 0 has sent a message with each of ``tags``, and rank 1 refuses them. The error, of a rank 0 that was told at
    once."""
    sent = []
    if group.rank() == 0:
        sent = [dist.isend(torch.ones(COUNT), tag=tag, group=group, group_dst=1) for tag in tags]
    dist.barrier(side)
    for tag in tags if group.rank() == 1 else ():
        _, _, problem = outcome(
            lambda tag=tag: dist.irecv(torch.ones(3), tag=tag, group=group, group_src=0), CollectiveMismatchError
        )
        assert problem is None, problem
    errors = [error for work in sent if (error := outcome(lambda work=work: work, CollectiveMismatchError)[0])]
    return errors[0] if errors else None


def all_reduce(group, **options):
    x = torch.full((3,), 2.0)
    try:
        work = dist.all_reduce(x, group=group, **options)
        if work is not None:
            work.wait()
    finally:
        assert x.tolist() == [4.0] * 3  # carried out all the same


CALLS = {
    "small all_reduce": all_reduce,
    "all_reduce, asynchronous": lambda group: all_reduce(group, async_op=True),
    "broadcast": lambda group: dist.broadcast(torch.ones(1 << 16), 0, group),
}


def by_a_collective(group, side, kind):
    """Both ranks make a call of this kind until the first is told by it; they hear of that by another group."""
    error, told, until = refused(group, side, [0]), 0, time.monotonic() + SECONDS
    while not told and time.monotonic() < until:
        try:
            CALLS[kind](group)
        except CollectiveMismatchError as raised:
            error = raised
        both = torch.tensor([float(error is not None)])
        dist.all_reduce(both, group=side)
        told = both.item()
    if told != 1 or (error is None) == (group.rank() == 0):
        return [f"{told} ranks were told; here: {error}"]
    if group.rank() == 1:
        return []
    wrong = mentions(error, (COUNT, torch.float32), (3, torch.float32), 0)
    return wrong + ([] if "send #" in str(error) else [f"no number in: {error}"])


def by_waiting_for_an_answer(group, side):
    """Which does not come, since the other has refused."""
    error, began = refused(group, side, [0]), time.monotonic()
    if group.rank() == 0 and error is None:
        try:
            dist.recv(torch.zeros(3), tag=5, group=group, group_src=1)
        except Exception as raised:
            error = raised
    dist.barrier(side)
    if group.rank() == 1:
        return []
    if time.monotonic() - began > SECONDS:
        return [f"after {time.monotonic() - began:.1f} s"]
    return mentions(error, (COUNT, torch.float32), (3, torch.float32), 0)


def several(group, side):
    """Each is told once."""
    text = str(refused(group, side, range(3)))
    if group.rank() == 0:
        until = time.monotonic() + SECONDS
        while text.count("bytes of float32, rank 1") < 3 and time.monotonic() < until:
            text += str(told_later(lambda: dist.send(torch.ones(1), tag=77, group=group, group_dst=1)))
    dist.barrier(side)
    dist.barrier(group)
    if group.rank() == 1:
        return []
    return [f"not once: tag {tag} in {text}" for tag in range(3) if text.count(f"(tag {tag})") != 1]


def after_the_group(group, side):
    """A refusal that comes when its group is gone is told to nobody, in a later group neither."""
    first = pair()
    if first.rank() == 0:
        dist.send(torch.ones(COUNT), group=first, group_dst=1)
        dist.destroy_process_group(first)
        dist.barrier(side)
    else:
        dist.barrier(side)
        outcome(lambda: dist.irecv(torch.ones(3), group=first, group_src=0), CollectiveMismatchError)
        dist.destroy_process_group(first)
    later, wrong = pair(), []
    for count in (3, COUNT):
        x = torch.full((count,), float(later.rank()))
        dist.broadcast(x, 0, later)
        if later.rank() == 0:
            dist.send(x + 1, group=later, group_dst=1)
        else:
            dist.recv(x, group=later, group_src=0)
            wrong += [] if x.eq(1).all() else [f"{count} elements: {x}"]
    dist.destroy_process_group(later)
    return wrong


def later_cases():
    group, side = pair(), pair()
    if group is None:
        pair(), pair()  # those of the last case
        return []
    if not over_hosts(group):
        pair(), pair()
        return None
    wrong = []
    for kind in CALLS:
        wrong += [f"{kind}: {w}" for w in by_a_collective(group, side, kind)]
    for case in (by_waiting_for_an_answer, several, after_the_group):
        wrong += [f"{case.__name__}: {w}" for w in case(group, side)]
    return wrong


@pytest.mark.world_sizes(4)
def test_the_sender_of_what_was_refused_is_told_by_its_next_call(ranks):
    found = ranks.run(later_cases)
    if None in found:
        pytest.skip("between hosts only")
    assert not any(found), found
