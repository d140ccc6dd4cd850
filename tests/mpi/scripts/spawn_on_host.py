"""What mp.spawn starts on each of two hosts: ranks 2 * host and 2 * host + 1 of four."""

import os

import torch
import torch.distributed as dist


def rank_main(local, host, address, port):
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    rank = 2 * host + local
    dist.init_process_group("custom", init_method=f"tcp://{address}:{port}", rank=rank, world_size=4)
    x = torch.full((1000,), rank)
    dist.all_reduce(x)
    assert (x == 6).all(), x
    dist.destroy_process_group()
