"""init_process_group, one all_reduce, destroy; as often as asked. One JSON line per rank."""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default=os.environ.get("C10D_TEST_BACKEND", "custom"))
parser.add_argument("--init", default=None)
parser.add_argument("--times", type=int, default=1)
parser.add_argument("--size", type=int, default=-1)
args = parser.parse_args()


def environment():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ.get(name) for name in names}


before = environment()
totals, ports = [], []
for _ in range(args.times):
    dist.init_process_group(args.backend, init_method=args.init, world_size=args.size)
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    totals.append(total.item())
    ports.append(os.environ["MASTER_PORT"])
    dist.destroy_process_group()

mpi_rank = mpi_size = None
if "mpi4py.MPI" in sys.modules:
    from mpi4py import MPI

    mpi_rank, mpi_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
print(
    json.dumps(
        {
            "rank": rank,
            "size": size,
            "before": before,
            "after": environment(),
            "totals": totals,
            "ports": ports,
            "addr": os.environ["MASTER_ADDR"],
            "mpi": [mpi_rank, mpi_size],
        }
    ),
    flush=True,
)
