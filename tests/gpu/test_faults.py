"""A rank dies, is late or asks for something else: every survivor raises, and its streams come to rest."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError, CustomBackendError, PeerLostError
from harness import RankFailure, RankPool

from .device import device_of

NOTICED = 1.0  # seconds within which a death must be known: 100 ms, and what the GPU's own calls take
AT_REST = 5.0  # seconds within which a survivor's GPU work must have drained


def raised(call, *kinds):
    began = time.monotonic()
    try:
        call()
    except kinds as error:
        error.seconds = time.monotonic() - began
        return error
    raise AssertionError("nothing was raised")


def drained(device):
    """Whether this process's GPU work ends, and new work on the GPU gives what it should: None, or what is wrong."""
    began = time.monotonic()
    device.synchronize()
    seconds = time.monotonic() - began
    if seconds > AT_REST:
        return f"the streams came to rest only after {seconds:.1f} s"
    after = device.put(torch.ones(256, 256))
    return None if (after @ after).sum().item() == 256**3 else "afterwards the GPU computes nonsense"


def endless(device, call, group):
    """Calls until one raises; what is queued keeps the GPU at work meanwhile."""
    data = device.put(torch.ones(call["count"]))
    for _ in range(100_000):
        work = dist.all_reduce(data, group=group, async_op=call["async"])
        if call["async"]:
            work.wait()


def dying(kind, call):
    device, rank = device_of(kind), dist.get_rank()
    group = dist.new_group()
    dist.all_reduce(device.put(torch.ones(call["count"])), group=group)
    device.synchronize()
    dist.barrier()
    if rank == 1:
        pid = os.getpid()
        if os.fork() == 0:  # dies in the middle of whatever this rank is doing
            time.sleep(0.7)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
    began = time.monotonic()
    error = raised(lambda: endless(device, call, group), PeerLostError)
    late = time.monotonic() - began - 0.7
    rest = drained(device)
    raise RuntimeError(f"SURVIVOR {rank} noticed after {late:.3f} s; {rest or 'at rest'}; {error}")


@pytest.mark.parametrize(
    "call",
    [{"count": 16, "async": False}, {"count": 4_000_000, "async": False}, {"count": 4_000_000, "async": True}],
    ids=["small", "large", "large, async"],
)
def test_a_dead_rank_is_named(device, backend, call):
    pool = RankPool(3, backend)
    with pytest.raises(RankFailure) as failure:
        pool.run(dying, device, call, timeout=40)
    text = str(failure.value)
    for survivor in (0, 2):
        found = re.search(rf"SURVIVOR {survivor} noticed after (-?[\d.]+) s; at rest", text)
        assert found and -0.1 < float(found[1]) < NOTICED, text
    assert text.count("rank 1 (pid") >= 2 and "has died" in text, text


def late(kind, what):
    device, rank, size = device_of(kind), dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    dist.all_reduce(device.put(torch.ones(1000)), group=group, async_op=False)
    device.synchronize()
    dist.barrier()
    if rank == size - 1:
        time.sleep(3)
        dist.destroy_process_group(group)
        return None
    data = device.put(torch.ones(1 << 20))
    call = {
        "all_reduce": lambda: dist.all_reduce(data, group=group),
        "async": lambda: dist.all_reduce(data, group=group, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(data, group=group, group_src=0),
        "recv": lambda: (dist.recv(data, group=group, group_src=size - 1), device.synchronize()),
    }[what]
    error = raised(call, CollectiveTimeoutError)
    wrong = [] if 1.3 < error.seconds < 2.5 else [f"after {error.seconds:.2f} s"]
    if f"rank {size - 1}" not in str(error):
        wrong.append(str(error))
    wrong += filter(None, [drained(device)])
    dist.destroy_process_group(group)
    return wrong or None


@pytest.mark.world_sizes(4)
@pytest.mark.parametrize("what", ["all_reduce", "async", "broadcast", "recv"])
def test_a_timeout_names_the_rank_that_is_missing(ranks, device, what):
    assert not any(found := ranks.run(late, device, what)), found


def disagreements(device):
    """{field: (what rank 0 calls, what the others call)}"""

    def all_reduce(count=4, dtype=torch.float32, op=ReduceOp.SUM):
        return lambda g: dist.all_reduce(device.put(torch.ones(count, dtype=dtype)), op, group=g)

    return {
        "dtype": (all_reduce(), all_reduce(dtype=torch.int32)),
        "redop": (all_reduce(), all_reduce(op=ReduceOp.MAX)),
        "count": (all_reduce(), all_reduce(5)),
        "count, long": (all_reduce(5_000_000), all_reduce(5_000_001)),
        "op": (all_reduce(), lambda g: dist.broadcast(device.put(torch.ones(4)), group=g, group_src=0)),
        "root": tuple(
            lambda g, root=root: dist.broadcast(device.put(torch.ones(4)), group=g, group_src=root) for root in (0, 1)
        ),
    }


FIELDS = ("dtype", "redop", "count", "count, long", "op", "root")


def mismatch(kind, field):
    device, rank = device_of(kind), dist.get_rank()
    group = dist.new_group()
    warm = device.put(torch.ones(4))
    dist.all_reduce(warm, group=group)
    error = raised(lambda: disagreements(device)[field][0 if rank == 0 else 1](group), CollectiveMismatchError)
    text = str(error)
    wrong = [f"rank {r} is not in the table" for r in range(group.size()) if f"rank {r}:" not in text]
    if field.split(",")[0] not in text:
        wrong.append("the field is not named")
    if error.seconds > 5:
        wrong.append(f"took {error.seconds:.1f} s")
    if "no more use" not in str(
        raised(lambda: dist.all_reduce(device.put(torch.ones(4)), group=group), CustomBackendError)
    ):
        wrong.append("afterwards the group is used")
    wrong += filter(None, [drained(device)])
    dist.destroy_process_group(group)
    total = device.put(torch.ones(3))
    dist.all_reduce(total)  # the other groups of these ranks go on
    if total.tolist() != [dist.get_world_size()] * 3:
        wrong.append(f"world group: {total}")
    return f"{wrong} in {text}" if wrong else None


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("field", FIELDS)
def test_disagreement_is_told_to_every_rank(ranks, device, field):
    assert not any(found := ranks.run(mismatch, device, field)), found


def refusal(kind):
    from c10d_custom.errors import UsageError

    device = device_of(kind)
    wrong = []
    for dtype, op in ((torch.float32, ReduceOp.BAND), (torch.bool, ReduceOp.AVG), (torch.complex64, ReduceOp.MAX)):
        try:
            dist.all_reduce(device.put(torch.ones(4, dtype=dtype)), op)
            wrong.append(f"{op} of {dtype} did not raise")
        except (UsageError, ValueError):
            pass
        data = device.put(torch.ones(4))
        dist.all_reduce(data)
        if data.tolist() != [dist.get_world_size()] * 4:
            wrong.append(f"after {op} of {dtype}: {data}")
    return wrong or None


@pytest.mark.world_sizes(2)
def test_a_call_without_a_meaning_is_refused_and_the_group_goes_on(ranks, device):
    assert not any(found := ranks.run(refusal, device)), found
