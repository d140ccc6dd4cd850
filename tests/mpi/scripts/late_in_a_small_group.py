"""Of two hosts with two ranks each, rank 2 is late for a call of a group of ranks 0 and 2. Rank 0 goes on after its
time-out, of which ranks 1 and 3 hear nothing, and all end in order."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveTimeoutError


def main():
    dist.init_process_group("custom")
    rank, timed_out = dist.get_rank(), False
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        group.set_timeout(timedelta(seconds=2))
    dist.all_reduce(torch.ones(3))
    if rank == 2:
        time.sleep(4)
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except CollectiveTimeoutError:
            timed_out = True
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} {'timed out' if timed_out else 'heard nothing'}", flush=True)


if __name__ == "__main__":
    main()
