"""A rank whose program finalises MPI amid a group over hosts, and what each operation then raises."""

import json

import torch
import torch.distributed as dist

dist.init_process_group("custom")
rank, size = dist.get_rank(), dist.get_world_size()
small, large = torch.ones(1), torch.ones(300_000)
dist.all_reduce(small)
under_way = dist.irecv(large, (rank + 1) % size, tag=7)  # which nobody sends

from mpi4py import MPI  # noqa: E402

MPI.Finalize()
told = {}
for name, call in {
    "small": lambda: dist.all_reduce(small),
    "large": lambda: dist.all_reduce(large),
    "asynchronous": lambda: dist.all_reduce(large, async_op=True).wait(),
    "barrier": dist.barrier,
    "send": lambda: dist.send(small, (rank + 1) % size),
    "receive": lambda: dist.irecv(large, (rank + 1) % size).wait(),
    "under way": under_way.wait,
}.items():
    try:
        call()
    except dist.DistError as error:
        told[name] = [type(error).__name__, "the program has finalised MPI" in str(error), str(error)]
    else:
        told[name] = None
dist.destroy_process_group()
print(json.dumps({"rank": rank, "told": told}), flush=True)
