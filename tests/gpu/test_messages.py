"""Point-to-point on GPU tensors: matching, order, large messages both ways, and no waiting for each other."""

import pytest
import torch
import torch.distributed as dist

from conformance import reference, values
from conformance.cases import check

from .device import device_of


def message(source, target, tag, count):
    return values.inputs(torch.float32, source, "bits", None, count, start=1000 * target + 77 * tag)


def ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


def both_ways(kind, count):
    """Each rank issues its send before its receive: that must not deadlock, however large."""
    device = device_of(kind)
    rank, right, left = ring()
    got = device.put(torch.zeros(count))
    device.busy(0.05)
    sent = dist.isend(device.put(message(rank, right, 0, count)), right)
    received = dist.irecv(got, left)
    sent.wait()
    received.wait()
    return list(filter(None, [reference.difference(got.cpu(), message(left, rank, 0, count))]))


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("count", [1, 100_003, 16 << 20])
def test_both_ways(ranks, device, count):
    check(ranks, both_ways, device, count)


TAGGED = {0: 5, 1: 0, 2: 1 << 20, 3: 40000, 12: 1, 513: 300000}  # tag: elements


def tags_in_reverse(kind):
    device = device_of(kind)
    rank, right, left = ring()
    sent = [dist.isend(device.put(message(rank, right, tag, count)), right, tag=tag) for tag, count in TAGGED.items()]
    wrong = []
    for tag, count in reversed(TAGGED.items()):
        got = device.put(torch.zeros(count))
        dist.recv(got, left, tag=tag)
        if problem := reference.difference(got.cpu(), message(left, rank, tag, count)):
            wrong.append(f"tag {tag}: {problem}")
    for work in sent:
        work.wait()
    return wrong


def in_order(kind, count):
    """Many messages of unlike sizes between two ranks: first in, first out."""
    device = device_of(kind)
    rank, right, left = ring()
    sizes = [(7 * i) % 50 for i in range(count)]
    sent = [dist.isend(device.put(message(rank, right, i, n)), right) for i, n in enumerate(sizes)]
    outputs = [device.put(torch.zeros(n)) for n in sizes]
    received = [dist.irecv(output, left) for output in outputs]
    for work in sent + received:
        work.wait()
    return [
        f"message {i}"
        for i, output in enumerate(outputs)
        if reference.difference(output.cpu(), message(left, rank, i, sizes[i]))
    ]


def around_a_collective(kind):
    """A receive that waits for its sender holds up no collective."""
    device, size = device_of(kind), dist.get_world_size()
    rank, right, left = ring()
    got, total = device.put(torch.zeros(50000)), device.put(torch.ones(50000))
    received = dist.irecv(got, left)
    dist.all_reduce(total)
    dist.send(device.put(message(rank, right, 0, 50000)), right)
    received.wait()
    return list(
        filter(
            None,
            [
                reference.difference(got.cpu(), message(left, rank, 0, 50000)),
                reference.difference(total.cpu(), torch.full((50000,), float(size))),
            ],
        )
    )


def any_source(kind, count):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(device.put(message(rank, 0, 3, count)), 0, tag=3)
        return []
    wrong, seen = [], []
    for _ in range(size - 1):
        got = device.put(torch.zeros(count))
        source = dist.recv(got, tag=3)
        seen.append(source)
        if problem := reference.difference(got.cpu(), message(source, 0, 3, count)):
            wrong.append(f"from {source}: {problem}")
    return wrong + ([] if sorted(seen) == list(range(1, size)) else [f"sources {seen}"])


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize(
    "case, arguments",
    [
        (tags_in_reverse, ()),
        (in_order, (200,)),
        (around_a_collective, ()),
        (any_source, (1,)),
        (any_source, (700_000,)),
    ],
    ids=["tags", "order", "collective", "any source", "any source, large"],
)
def test_messages(ranks, device, case, arguments):
    check(ranks, case, device, *arguments)
