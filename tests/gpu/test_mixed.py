"""CPU and GPU tensors in one group: one order of calls, no mixing inside a call, and ranks that differ are told."""

import pytest
import torch
import torch.distributed as dist

from conformance.cases import check

from .device import device_of


def wanted(start):
    return float(sum(start + rank for rank in range(dist.get_world_size())))


def in_turns(kind, asynchronous):
    device, rank = device_of(kind), dist.get_rank()
    issued = []
    for i in range(24):
        data = torch.full((1 + 9999 * (i % 5),), float(i + rank))
        if i % 2:
            data = device.put(data)
        issued.append((data, dist.all_reduce(data, async_op=asynchronous)))
    wrong = []
    for i, (data, work) in enumerate(issued):
        if asynchronous:
            work.wait()
        if not (data.cpu() == wanted(i)).all():
            wrong.append(f"call {i} on {data.device}: {data[:3]} instead of {wanted(i)}")
    dist.barrier()
    return wrong


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_in_turns(ranks, device, asynchronous):
    check(ranks, in_turns, device, asynchronous)


def async_on_one_sync_on_the_other(kind):
    """A synchronous CPU call comes after the GPU calls issued before it."""
    device, rank = device_of(kind), dist.get_rank()
    data, other = device.put(torch.full((100_000,), float(rank))), torch.full((4,), float(1 + rank))
    device.busy(0.1)
    work = dist.all_reduce(data, async_op=True)
    dist.all_reduce(other)
    work.wait()
    return [f"{t.device}: {t[:3]}" for t, start in ((data, 0), (other, 1)) if not (t.cpu() == wanted(start)).all()]


def test_async_on_one_sync_on_the_other(ranks, device):
    check(ranks, async_on_one_sync_on_the_other, device)


def objects(kind):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    everyone = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "tensor": device.put(torch.full((3,), float(rank)))})
    said = [["from rank 0", 7]] if rank == 0 else [None]
    dist.broadcast_object_list(said, 0)
    wrong = [f"object of {r}" for r, o in enumerate(everyone) if o["rank"] != r or o["tensor"].tolist() != [r] * 3]
    return wrong + ([] if said == [["from rank 0", 7]] else [f"broadcast {said}"])


def test_objects(ranks, device):
    check(ranks, objects, device)


def refused(kind):
    """Tensors of two devices in one call."""
    from c10d_custom.errors import UsageError

    device, size = device_of(kind), dist.get_world_size()
    wrong = []
    for what, call in (
        ("all_gather", lambda: dist.all_gather([torch.zeros(2) for _ in range(size)], device.put(torch.ones(2)))),
        (
            "all_gather_into_tensor",
            lambda: dist.all_gather_into_tensor(torch.zeros(2 * size), device.put(torch.ones(2))),
        ),
        ("all_reduce_coalesced", lambda: dist.all_reduce_coalesced([torch.ones(2), device.put(torch.ones(2))])),
    ):
        try:
            call()
            wrong.append(f"{what} of two devices did not raise")
        except (UsageError, ValueError, RuntimeError) as error:
            if "cpu" not in str(error) and "device" not in str(error):
                wrong.append(f"{what}: the error does not speak of devices: {error}")
    data = device.put(torch.ones(4))
    dist.all_reduce(data)
    return wrong if data.tolist() == [size] * 4 else wrong + [f"afterwards all_reduce gives {data}"]


def test_two_devices_in_one_call_are_refused(ranks, device, needs_queues):
    check(ranks, refused, device)


def disagree(kind):
    """Rank 0 has its tensor on the GPU, the others on the CPU."""
    from c10d_custom.errors import CollectiveMismatchError

    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    data = torch.ones(1000)
    try:
        dist.all_reduce(device.put(data) if rank == 0 else data, group=group)
        return ["nothing was raised"]
    except CollectiveMismatchError as error:
        text = str(error)
    dist.destroy_process_group(group)
    return [
        f"{word!r} not in: {text}"
        for word in ("cuda", *(f"rank {r}:" for r in range(size)))
        if word not in text.lower()
    ]


@pytest.mark.world_sizes(2, 4)
def test_ranks_that_differ_in_device_are_told(ranks, device, needs_queues):
    check(ranks, disagree, device)
