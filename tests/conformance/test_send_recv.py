"""send, recv, isend, irecv, batch_isend_irecv: matching by source and tag, first in first out."""

import pytest
import torch
import torch.distributed as dist

from . import reference, values
from .cases import Signal, check, finish
from .cases import group as make_group
from .selection import SECTIONS


def send_recv(case, group):
    """Around a ring; sync: even positions send first."""
    right, left = (group.me + 1) % group.size, (group.me - 1) % group.size
    data, output = group.placed_input(case), group.output(case)
    if case.async_op:
        works = [
            dist.irecv(output.tensor, group.ranks[left], group.pg),
            dist.isend(data.tensor, group.ranks[right], group.pg),
        ]
        for work in works:
            finish(work, case)
    else:

        def send():
            dist.send(data.tensor, group=group.pg, group_dst=right)

        def recv():
            source = dist.recv(output.tensor, group.ranks[left], group.pg)
            assert source == group.ranks[left], source

        for step in (send, recv) if group.me % 2 == 0 else (recv, send):
            step()
    yield "received", output, group.input(case, left)
    yield "sent", data, group.input(case)


def batch(case, group):
    """Every ordered pair of ranks at once."""
    peers = [i for i in range(group.size) if i != group.me]
    data = {i: group.placed_input(case, start=i * case.count) for i in peers}
    outputs = {i: group.output(case) for i in peers}
    ops = [dist.P2POp(dist.irecv, outputs[i].tensor, group=group.pg, group_peer=i) for i in peers]
    ops += [dist.P2POp(dist.isend, data[i].tensor, group=group.pg, group_peer=i) for i in peers]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for i, output in outputs.items():
        yield f"from {i}", output, group.input(case, i, start=group.me * case.count)


@pytest.mark.parametrize("section", SECTIONS)
def test_send_recv(conform, section):
    conform(send_recv, section)


@pytest.mark.parametrize("section", SECTIONS)
def test_batch(conform, section):
    conform(batch, section)


def _message(source, target, tag, count):
    return values.inputs(torch.float32, source, "bits", None, count, start=1000 * target + 77 * tag)


_TAGGED = {0: 5, 1: 0, 2: 1 << 20, 3: 40000, 12: 1, 513: 300000, 2**31 - 1: 7}  # tag: elements


def _tags_in_reverse():
    """To the right neighbour, all tags; received in the opposite order of sending."""
    g = make_group()
    right, left = (g.me + 1) % g.size, (g.me - 1) % g.size
    sent = [dist.isend(_message(g.me, right, tag, count), right, tag=tag) for tag, count in _TAGGED.items()]
    wrong = []
    for tag, count in reversed(_TAGGED.items()):
        got = torch.zeros(count)
        dist.recv(got, left, tag=tag)
        problem = reference.difference(got, _message(left, g.me, tag, count))
        if problem:
            wrong.append(f"tag {tag}: {problem}")
    for work in sent:
        work.wait()
    return wrong


def test_tags_in_reverse(ranks):
    check(ranks, _tags_in_reverse)


def _same_tag_in_order(count):
    """Many messages of unlike sizes between the same two ranks are matched first in, first out."""
    g = make_group()
    right, left = (g.me + 1) % g.size, (g.me - 1) % g.size
    sizes = [(7 * i) % 50 for i in range(count)]
    sent = [dist.isend(_message(g.me, right, i, n), right) for i, n in enumerate(sizes)]
    outputs = [torch.zeros(n) for n in sizes]
    received = [dist.irecv(output, left) for output in outputs]
    for work in sent + received:
        work.wait()
    return [
        f"message {i}"
        for i, output in enumerate(outputs)
        if reference.difference(output, _message(left, g.me, i, sizes[i]))
    ]


def test_1000_isends_outstanding(ranks):
    check(ranks, _same_tag_in_order, 1000)


HEAD, CELL = 24, 32 << 10  # bytes: the payload that comes with a cell's head (backend/shm/layout.h), and a cell's


def _payloads_about_a_head():
    """Short ones, and long ones whose last piece is short."""
    g = make_group()
    right, left = (g.me + 1) % g.size, (g.me - 1) % g.size
    wrong = []
    for count in [base + more for base in (0, CELL, 3 * CELL) for more in (1, HEAD - 1, HEAD, HEAD + 1, 64, 65)]:
        said = [(torch.arange(count) * (rank + 3) % 251).to(torch.uint8) for rank in range(g.size)]
        got = torch.zeros(count, dtype=torch.uint8)
        sent = dist.isend(said[g.me], right)
        dist.recv(got, left)
        sent.wait()
        if not got.equal(said[left]):
            wrong.append(f"{count} bytes")
    return wrong


def test_payloads_about_a_head(ranks):
    check(ranks, _payloads_about_a_head)


def _any_source(count, tag):
    """Everyone sends to rank 0, which takes them as they come."""
    g = make_group()
    wrong = []
    if g.me:
        dist.send(_message(g.me, 0, tag, count), 0, tag=tag)
        dist.send(_message(g.me, 1, tag, count), 0, tag=tag)
        return wrong
    seen = []
    for turn in range(2 * (g.size - 1)):
        got = torch.zeros(count)
        if turn % 2:
            source = dist.recv(got, tag=tag)
        else:
            work = dist.irecv(got, tag=tag)
            work.wait()
            source = work._source_rank()
            if work.source_rank() != source:
                wrong.append(f"source_rank() {work.source_rank()}, _source_rank() {source}")
        problem = reference.difference(got, _message(source, seen.count(source), tag, count))
        if problem:
            wrong.append(f"message {turn}, said to be from {source}: {problem}")
        seen.append(source)
    if sorted(seen) != sorted(2 * list(range(1, g.size))):
        wrong.append(f"sources {seen}")
    return wrong


@pytest.mark.parametrize("count", [0, 1, 5000, 700000])
def test_any_source(ranks, backend, count):
    if backend == "gloo" and count == 0:
        pytest.skip("gloo: has no empty receive from any source")
    check(ranks, _any_source, count, 3)


def _any_source_posted_first():
    """Receives that nobody has sent to yet must not miss what then comes, nor take another tag's."""
    g = make_group()
    posted = Signal()
    wrong = []
    if g.me == 0:
        outputs = [torch.zeros(100) for _ in range(1, g.size)]
        works = [dist.irecv(output, tag=5) for output in outputs]
        posted.give()
        other = torch.zeros(100)
        dist.recv(other, 1, tag=6)
        wrong += filter(None, [reference.difference(other, _message(1, 0, 6, 100))])
        for work, output in zip(works, outputs):
            work.wait()
            wrong += filter(None, [reference.difference(output, _message(work._source_rank(), 0, 5, 100))])
        sources = sorted(work._source_rank() for work in works)
        if sources != list(range(1, g.size)):
            wrong.append(f"sources {sources}")
    else:
        posted.wait()
        if g.me == 1:
            dist.send(_message(1, 0, 6, 100), 0, tag=6)
        dist.send(_message(g.me, 0, 5, 100), 0, tag=5)
    return wrong


def test_any_source_posted_first(ranks):
    check(ranks, _any_source_posted_first)


def _large_both_ways(count):
    g = make_group()
    peer = 1 - g.me
    sent = dist.isend(_message(g.me, peer, 0, count), peer)
    got = torch.zeros(count)
    received = dist.irecv(got, peer)
    sent.wait()
    received.wait()
    return list(filter(None, [reference.difference(got, _message(peer, g.me, 0, count))]))


@pytest.mark.world_sizes(2)
def test_256_mb_both_ways(ranks):
    """Each rank issues its send before its receive: that must not deadlock, however large."""
    check(ranks, _large_both_ways, 64 << 20, timeout=120)


def _there_already(count):
    """Half of the messages come before their receives, half after; the Work of one that is sent is let go at once."""
    g = make_group()
    right, left = (g.me + 1) % g.size, (g.me - 1) % g.size
    early, late = torch.zeros(count), torch.zeros(count)
    waits = dist.irecv(late, left, tag=1)
    sent = dist.isend(_message(g.me, right, 0, count), right, tag=0)
    dist.barrier()
    dist.isend(_message(g.me, right, 1, count), right, tag=1)
    dist.irecv(early, left, tag=0).wait()
    waits.wait()
    sent.wait()
    dist.barrier()
    return list(
        filter(
            None,
            [
                reference.difference(early, _message(left, g.me, 0, count)),
                reference.difference(late, _message(left, g.me, 1, count)),
            ],
        )
    )


@pytest.mark.parametrize("count", [1, 1000, 8192, 20000, 300000])
def test_there_already(ranks, count):
    check(ranks, _there_already, count)


def _around_a_collective():
    """A receive that waits for its sender holds up no collective."""
    g = make_group()
    right, left = (g.me + 1) % g.size, (g.me - 1) % g.size
    got = torch.zeros(50000)
    received = dist.irecv(got, left)
    total = torch.ones(50000)
    dist.all_reduce(total)
    dist.send(_message(g.me, right, 0, 50000), right)
    received.wait()
    return list(
        filter(
            None,
            [
                reference.difference(got, _message(left, g.me, 0, 50000)),
                reference.difference(total, torch.full((50000,), float(g.size))),
            ],
        )
    )


def test_around_a_collective(ranks):
    check(ranks, _around_a_collective)


def _to_itself(count):
    g = make_group()
    got = torch.zeros(count)
    sent = dist.isend(_message(g.me, g.me, 0, count), g.me)
    received = dist.irecv(got, g.me)
    sent.wait()
    received.wait()
    return list(filter(None, [reference.difference(got, _message(g.me, g.me, 0, count))]))


@pytest.mark.parametrize("count", [1, 500000])
def test_to_itself(ranks, beyond_gloo, count):
    """isend's documentation allows it; send itself refuses."""
    beyond_gloo("has no pair with itself")
    check(ranks, _to_itself, count)
