"""mp.spawn with addresses of its own, in a process that an MPI launcher started."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, backend):
    dist.init_process_group(backend, rank=rank, world_size=2)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    print(json.dumps({"rank": rank, "total": total.item(), "mpi": "mpi4py.MPI" in sys.modules}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    mp.spawn(work, (sys.argv[1],), nprocs=2)
