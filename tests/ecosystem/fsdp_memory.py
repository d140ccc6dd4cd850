"""How long a step of fully_shard takes whose communication has memory of the group's, beside one in ordinary memory.

python tests/ecosystem/fsdp_memory.py [RANKS] [WIDTHxLAYERS ...]

Two models of the same Linear layers, each sharded by itself, step by turns on one row of input: nearly all of a step is
then communication, copies to and from its buffers, and fully_shard itself. Prints medians, in ms; and what the calls of
the group took of that."""

import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SECONDS = 6.0  # of steps, for each size


def model(width, layers, mesh, allocated):
    torch.manual_seed(1)
    made = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    for layer in (*made, made):
        fully_shard(layer, mesh=mesh)
        layer.set_allocate_memory_from_process_group_for_comm(allocated)
    return made, torch.optim.SGD(made.parameters(), lr=1e-6)


class Clock:
    """The time spent in two methods of the group."""

    def __init__(self, group):
        self.spent = 0.0
        for name in ("all_gather_single", "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base"):
            setattr(group, name, self.timed(getattr(group, name)))

    def timed(self, call):
        def wrapper(*arguments):
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.spent += time.perf_counter() - began

        return wrapper


def rank_main(rank, ranks, sizes, store):
    torch.set_num_threads(1)
    options = {"store": dist.FileStore(store, ranks), "timeout": timedelta(seconds=60)}
    dist.init_process_group("custom", rank=rank, world_size=ranks, **options)
    mesh = init_device_mesh("cpu", (ranks,))
    clock = Clock(mesh.get_group())
    for width, layers in sizes:
        sides = {allocated: model(width, layers, mesh, allocated) for allocated in (False, True)}
        x, steps, calls = torch.randn(1, width), {False: [], True: []}, {False: [], True: []}
        until = time.monotonic() + SECONDS
        while True:
            for allocated, (made, optimizer) in sides.items():
                dist.barrier()
                clock.spent, began = 0.0, time.perf_counter()
                optimizer.zero_grad()
                made(x).sum().backward()
                optimizer.step()
                steps[allocated].append(1e3 * (time.perf_counter() - began))
                calls[allocated].append(1e3 * clock.spent)
            over = torch.tensor(float(time.monotonic() > until))
            dist.broadcast(over, 0)
            if over:
                break
        if rank == 0:
            for what, times in (("step", steps), ("calls", calls)):
                ordinary, own = (statistics.median(times[side][2:]) for side in (False, True))
                print(f"{width}x{layers} {what}: {ordinary:.2f} ordinary, {own:.2f} of the group's", flush=True)
        del sides
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    sizes = [tuple(map(int, text.split("x"))) for text in sys.argv[2:] or ("256x6", "1024x6", "3000x3")]
    store = f"/tmp/fsdp_memory-{os.getpid()}"
    print(f"torch {torch.__version__}, {ranks} ranks, load {os.getloadavg()[0]:.1f}")
    mp.spawn(rank_main, (ranks, sizes, store), ranks)
