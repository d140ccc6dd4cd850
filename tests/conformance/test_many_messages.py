"""Many messages at a time: short ones that nobody receives, however many receives that wait, and the short way inside a
host."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError

BYTES = 16 << 10  # of the longest short message
MOST = 12 << 20  # bytes of them that are taken in from one rank before they are received, at most
MANY = 1500  # twice as many
FAR = 1 << 40  # a tag that no MPI has


NO_FAST_PATH = "this torch does not show C what its tensors are"


def first_and_last():
    """This rank's place in the pair, or None."""
    return {0: 0, dist.get_world_size() - 1: 1}.get(dist.get_rank())


def settled(works):
    """How many are over once no more are for a while. (The rank that takes them in may not have its turn for long.)"""
    last, since, until = -1, 0.0, time.monotonic() + 20
    while last < 0 or time.monotonic() < min(since + 1.5, until):
        if (now := sum(work.is_completed() for work in works)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.1)
    return last


def short_ones(tag):
    """The first rank sends more than the last has room for; it has a receive of another tag, so that it looks."""
    dist.barrier()
    place, peer = first_and_last(), dist.get_world_size() - 1
    wrong = []
    if place == 0:
        data = [torch.full((BYTES,), i % 251, dtype=torch.uint8) for i in range(251)]
        works = [dist.isend(data[i % 251], peer, tag=tag) for i in range(MANY)]
        over = settled(works)
        if not 100 < over < MOST // BYTES:
            wrong.append(f"{over} of {MANY} sends are over before any is received")
        dist.send(torch.ones(3), peer, tag=5)  # is not held up
        dist.recv(answer := torch.zeros(3), peer, tag=6)
        wrong += [] if answer.tolist() == [2.0] * 3 else [f"the other way: {answer}"]
        for work in works:
            work.wait()
    elif place == 1:
        other = dist.irecv(torch.zeros(3), 0, tag=5)
        other.wait()
        dist.send(torch.full((3,), 2.0), 0, tag=6)
        got = torch.zeros(BYTES, dtype=torch.uint8)
        for i in range(MANY):
            dist.recv(got, 0, tag=tag)
            if not got.eq(i % 251).all():
                wrong.append(f"message {i}: {got[0]}")
                break
    dist.barrier()
    return wrong


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("tag", [0, FAR])
def test_short_messages_that_nobody_receives_wait_at_their_sender(ranks, tag):
    assert not any(found := ranks.run(short_ones, tag)), found


def to_each_other(blocking, count, nbytes):
    me, n = dist.get_rank(), dist.get_world_size()
    right, left = (me + 1) % n, (me - 1) % n
    works = []
    for i in range(count):
        data = torch.full((nbytes,), (i + me) % 251, dtype=torch.uint8)
        if blocking:
            dist.send(data, right)
        else:
            works.append(dist.isend(data, right))
    got, wrong = torch.zeros(nbytes, dtype=torch.uint8), 0
    for i in range(count):
        dist.recv(got, left)
        wrong += not got.eq((i + left) % 251).all()
    for work in works:
        work.wait()
    dist.barrier()
    return wrong


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("blocking,count,nbytes", [(True, 400, BYTES), (False, 1200, BYTES), (True, 5000, 4)])
def test_all_send_short_messages_and_then_receive(ranks, blocking, count, nbytes):
    assert not any(found := ranks.run(to_each_other, blocking, count, nbytes)), found


def too_many(tag):
    """What has no room is told of by its receiver where it does not fit, and ends at its own time where it is for
    nobody; the group goes on."""
    place, wrong, errors = first_and_last(), [], []
    group = dist.new_group([0, dist.get_world_size() - 1], timeout=timedelta(seconds=60 if place else 6))
    if place == 0:
        data = torch.ones(BYTES, dtype=torch.uint8)
        works = [dist.isend(data, tag=tag, group=group, group_dst=1) for _ in range(MANY)]
        over = settled(works)
        dist.send(torch.tensor([over]), dist.get_world_size() - 1, tag=5)
        for work in works:
            try:
                work.wait()
            except Exception as error:
                errors.append(error)
        kinds = {type(error) for error in errors}
        if kinds != {CollectiveMismatchError, CollectiveTimeoutError}:
            wrong.append(f"{over} over, then {kinds}")
        refused = [error for error in errors if isinstance(error, CollectiveMismatchError)]
        if len(refused) != 1 or f"{BYTES} bytes of uint8" not in str(refused[0]):
            wrong.append(f"refused: {refused}")
        if len(errors) != MANY - over:
            wrong.append(f"{len(errors)} errors, {over} over")
        dist.send(torch.ones(3), dist.get_world_size() - 1, tag=5)
        dist.send(torch.ones(3), tag=5, group=group, group_dst=1)
    elif place == 1:
        over, other = torch.zeros(1, dtype=torch.int64), torch.zeros(3)
        last = dist.irecv(other, tag=5, group=group, group_src=0)  # for whose sake this rank looks
        dist.recv(over, 0, tag=5)
        got = torch.zeros(BYTES, dtype=torch.uint8)
        for _ in range(int(over)):
            dist.recv(got, tag=tag, group=group, group_src=0)
        try:
            dist.recv(torch.zeros(3), tag=tag, group=group, group_src=0)
            wrong.append("a message that does not fit")
        except CollectiveMismatchError:
            pass
        dist.recv(torch.zeros(3), 0, tag=5)
        last.wait()
        wrong += [] if other.tolist() == [1.0] * 3 else [f"afterwards: {other}"]
    dist.barrier()
    if place is not None:
        dist.destroy_process_group(group)
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_what_has_no_room_ends_as_a_long_message_does(ranks):
    assert not any(found := ranks.run(too_many, 3)), found


def with_far_tags():
    """Both orders, long and short, mixed receives."""
    dist.barrier()
    place, peer, wrong = first_and_last(), dist.get_world_size() - 1, []
    sizes = [3, BYTES, BYTES + 1, 300_000, 0, 70_000]
    if place == 0:
        works = [dist.isend(torch.full((n,), k, dtype=torch.uint8), peer, tag=FAR + k % 2) for k, n in enumerate(sizes)]
        for work in works:
            work.wait()
    elif place == 1:
        time.sleep(0.1)
        for k in (1, 0, 3, 2, 5, 4):
            got = torch.zeros(sizes[k], dtype=torch.uint8)
            source = dist.recv(got, 0 if k % 3 else None, tag=FAR + k % 2)
            wrong += [] if source == 0 and got.eq(k).all() else [f"message {k}: {source} {got}"]
    dist.barrier()
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_tags_that_mpi_does_not_have(ranks):
    assert not any(found := ranks.run(with_far_tags)), found


def asked_after(count):
    """How often a rank that waits with ``count`` receives asks after the group's health, in a quarter of a second."""
    group = dist.new_group([0, dist.get_world_size() - 1])
    asked = None
    if first_and_last() == 1:
        messages = getattr(group.cpu_transport, "_messages", None)
        receives = [dist.irecv(torch.zeros(2), tag=i % 3, group=group, group_src=0) for i in range(count)]
        if messages is not None:
            asked, check = [], messages._check
            messages._check = lambda peers: (asked.append(peers), check(peers))[1]
            time.sleep(0.25)
            messages._check = check
        dist.barrier()
        for receive in receives:
            receive.wait()
    else:
        dist.barrier()
        if first_and_last() == 0:
            for i in range(count):
                dist.isend(torch.ones(2), tag=i % 3, group=group, group_dst=1)
    dist.barrier()
    return asked and len(asked)


@pytest.mark.world_sizes(4)
def test_between_hosts_a_peer_is_asked_after_once_a_look(ranks):
    found = [n for n in ranks.run(asked_after, 400) if n is not None]
    if not found:
        pytest.skip("between hosts only; on one host: backend/tests/messages_test.cpp")
    assert 0 < found[0] < 400


def posted_slowly():
    """Of the messages between neighbours on one host, those that are posted the slow way; and what an error says."""
    transport, me = dist.group.WORLD.cpu_transport, dist.get_rank()
    if transport.fast_message is None:
        return NO_FAST_PATH
    neighbour = me ^ 1
    post, slow = transport.post, []
    transport.post = lambda message: (slow.append(message.name), post(message))[1]
    try:
        x = torch.full((4,), float(me))
        for work in dist.isend(x, neighbour), dist.irecv(y := torch.zeros(4), neighbour):
            work.wait()
        if me % 2:
            dist.send(x, neighbour)
            dist.recv(y, neighbour)
        else:
            dist.recv(y, neighbour)
            dist.send(x, neighbour)
    finally:
        del transport.post
    wrong = [f"posted: {slow}"] if slow else []
    wrong += [] if y.tolist() == [float(neighbour)] * 4 else [str(y)]
    work = dist.isend(x, neighbour, tag=9)
    receive = dist.irecv(torch.zeros(3), neighbour, tag=9)
    try:
        receive.wait()
        wrong.append("a message that does not fit")
    except CollectiveMismatchError as error:
        wrong += [] if f"rank {neighbour}" in str(error) and f"rank {me}" in str(error) else [str(error)]
    work.wait()
    receive = dist.irecv(y, neighbour)
    dist.isend(x, neighbour).wait()
    receive.wait()
    wrong += [] if receive._source_rank() == neighbour else [f"from {receive._source_rank()}"]
    dist.barrier()
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_inside_a_host_messages_go_the_fast_path(ranks):
    found = ranks.run(posted_slowly)
    if found == [NO_FAST_PATH] * len(found):
        pytest.skip(NO_FAST_PATH)
    assert not any(found), found
