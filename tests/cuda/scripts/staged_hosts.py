"""CUDA tensors over several (emulated) hosts, the GPUs simulated. One JSON line per rank."""

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch
import torch.distributed as dist

from conformance.values import raw
from fake_driver import FakeDriver
from fake_world import World
from thread_ranks import cpu_tensors, standing_in

rank = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "0")))
world = World(seed=rank, laziness=0.9)
driver = FakeDriver(world, 0, process=os.getpid())


def on_device(contents):
    t = torch.empty_like(contents)
    world.keep += [t, contents]
    with driver.activate():
        driver.user(driver.current_stream(), lambda: t.copy_(contents), writes=[t])
    return t


def seen(t):
    got = []
    with driver.activate():
        driver.user(driver.current_stream(), lambda: got.append(t.clone()), reads=[t])
    world.settle()
    return got[0]


def same(device, host):
    return bool(torch.equal(raw(seen(device)), raw(host)))


result = {}
with standing_in(lambda device: driver):
    dist.init_process_group("custom")
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, 2000, 100_001):
        mine = torch.randn(count, generator=torch.Generator().manual_seed(rank))
        device, host = on_device(mine), mine.clone()
        outs, wanted = [on_device(torch.zeros(count)) for _ in range(size)], [torch.zeros(count) for _ in range(size)]
        work = dist.all_reduce(device, async_op=True)
        with cpu_tensors():
            dist.all_reduce(host)  # the same bits as those of CPU tensors
            dist.all_gather(wanted, mine)
        work.wait()
        dist.all_gather(outs, on_device(mine))
        result[f"all_reduce {count}"] = same(device, host)
        result[f"all_gather {count}"] = all(same(o, w) for o, w in zip(outs, wanted))
    other = (rank + size // 2) % size if size % 2 == 0 else size - 1 - rank
    if other != rank:
        into = on_device(torch.zeros(500_000))
        works = [dist.isend(on_device(torch.full((500_000,), float(rank))), other), dist.irecv(into, other)]
        for work in works:
            work.wait()
        result["messages"] = same(into, torch.full((500_000,), float(other)))
    with cpu_tensors():
        dist.all_reduce(torch.zeros(1))  # or the mismatch would end the group amid another rank's message
    error = None
    try:
        t = torch.ones(4)
        if rank == 0:
            with cpu_tensors():
                dist.all_reduce(t)
        else:
            dist.all_reduce(on_device(t))
    except dist.DistBackendError as found:
        error = f"{type(found).__name__}: {found}"
    result["mismatch"] = error
    dist.destroy_process_group()
print(json.dumps({"rank": rank, "result": result, "violations": world.violations}), flush=True)
