"""Every collective, of several sizes; then a call on which the ranks disagree. Whole numbers: exact in any order.

    many.py [RANKS]

RANKS: the most that take part in flat exchanges; in a group of more, the agreement is a dissemination barrier between
the hosts.
"""

import json
import sys

import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveMismatchError
from c10d_custom.transport.hosts import algorithm

if len(sys.argv) > 1:
    algorithm.MOST_RANKS = int(sys.argv[1])
dist.init_process_group("custom")
rank, size = dist.get_rank(), dist.get_world_size()


def of(r, n):
    return torch.arange(n, dtype=torch.int64) * 7 + r * 1000003


def check(name, got, expected):
    if not torch.equal(got, expected):
        wrong.append(f"{name}: {got.flatten()[:8].tolist()} instead of {expected.flatten()[:8].tolist()}")


wrong = []
for n in (0, 1, 1000, 300_000):
    everyone = [of(r, n) for r in range(size)]
    total = torch.stack(everyone).sum(0)
    for root in range(size):
        x = of(rank, n)
        dist.broadcast(x, root)
        check(f"broadcast from {root} of {n}", x, everyone[root])
        x = of(rank, n)
        dist.reduce(x, root)
        if rank == root:
            check(f"reduce to {root} of {n}", x, total)
        out = [torch.zeros_like(x) for _ in range(size)] if rank == root else None
        dist.gather(of(rank, n), out, root)
        if rank == root:
            check(f"gather to {root} of {n}", torch.stack(out), torch.stack(everyone))
        x = torch.zeros(n, dtype=torch.int64)
        dist.scatter(x, everyone if rank == root else None, root)
        check(f"scatter from {root} of {n}", x, everyone[rank])
    x = of(rank, n)
    dist.all_reduce(x)
    check(f"all_reduce of {n}", x, total)
    x = torch.zeros(size * n, dtype=torch.int64)
    dist.all_gather_into_tensor(x, of(rank, n))
    check(f"all_gather of {n}", x, torch.cat(everyone))
    whole = [of(r, n * size) for r in range(size)]
    x = torch.zeros(n, dtype=torch.int64)
    dist.reduce_scatter_tensor(x, whole[rank])
    check(f"reduce_scatter of {n}", x, torch.stack(whole).sum(0).view(size, n)[rank])
    x = torch.zeros(size * n, dtype=torch.int64)
    dist.all_to_all_single(x, whole[rank])
    check(f"all_to_all of {n}", x, torch.cat([w.view(size, n)[rank] for w in whole]))
    dist.barrier()
# More sizes than a transport remembers requests of.
for n in 2 * [20_000, 30_000, 40_000, 50_000, 60_000, 70_000, 150_000, 90_000]:
    x = of(rank, n)
    dist.all_reduce(x)
    check(f"all_reduce of {n}", x, torch.stack([of(r, n) for r in range(size)]).sum(0))

try:
    dist.all_reduce(torch.zeros(8 if rank else 9))
    mismatch = None
except CollectiveMismatchError as error:
    mismatch = str(error)
print(json.dumps({"rank": rank, "wrong": wrong, "mismatch": mismatch}), flush=True)
dist.destroy_process_group()
