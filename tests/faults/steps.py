"""Random collectives and messages, sync and async, small and large, each with what it must give."""

import torch
import torch.distributed as dist

SIZES = (1, 100, 5_000, 300_000)  # of int64


def fill(rank, step, n):
    return torch.arange(n, dtype=torch.int64) + 1_000_003 * rank + 101 * step


def one_step(rng, step, group=None):
    """One operation of the group. Returns what differs from what it should have given, or None. Nothing is drawn by one
    rank alone."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    kind = rng.choice(
        (
            "all_reduce",
            "broadcast",
            "reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "gather",
            "scatter",
            "barrier",
            "ring",
        )
    )
    n, root, asynchronous = rng.choice(SIZES), rng.randrange(size), rng.random() < 0.4
    each = max(1, n // size)
    own = fill(rank, step, n)
    total = size * fill(0, step, n) + 1_000_003 * (size * (size - 1) // 2)
    parts = [fill(r, step, each) for r in range(size)]
    got, expected, work = None, None, None
    if kind == "all_reduce":
        got, expected = own, total
        work = dist.all_reduce(got, group=group, async_op=asynchronous)
    elif kind == "broadcast":
        got, expected = own, fill(root, step, n)
        work = dist.broadcast(got, group=group, group_src=root, async_op=asynchronous)
    elif kind == "reduce":
        got, expected = own, total if rank == root else None
        work = dist.reduce(got, group=group, group_dst=root, async_op=asynchronous)
    elif kind == "all_gather":
        outputs, got, expected = [torch.zeros_like(p) for p in parts], "list", parts
        work = dist.all_gather(outputs, parts[rank], group=group, async_op=asynchronous)
    elif kind == "reduce_scatter":
        got, expected = torch.zeros_like(parts[0]), size * parts[rank] + 7 * size
        work = dist.reduce_scatter(got, [p + 7 for p in parts], group=group, async_op=asynchronous)
    elif kind == "all_to_all":
        # Rank r gives rank q part r, plus q.
        outputs, got, expected = [torch.zeros_like(p) for p in parts], "list", [p + rank for p in parts]
        if dist.get_backend(group) == "gloo":
            flat = torch.zeros(size * each, dtype=torch.int64)
            work = dist.all_to_all_single(
                flat, torch.cat([parts[rank] + q for q in range(size)]), group=group, async_op=asynchronous
            )
            outputs = list(flat.split(each))
        else:
            work = dist.all_to_all(outputs, [parts[rank] + q for q in range(size)], group=group, async_op=asynchronous)
    elif kind == "gather":
        outputs, got, expected = [torch.zeros_like(p) for p in parts], "list" if rank == root else None, parts
        work = dist.gather(
            parts[rank], outputs if rank == root else None, group=group, group_dst=root, async_op=asynchronous
        )
    elif kind == "scatter":
        got, expected = torch.zeros_like(parts[0]), parts[rank]
        work = dist.scatter(got, parts if rank == root else None, group=group, group_src=root, async_op=asynchronous)
    elif kind == "ring":
        got, expected = torch.zeros_like(own), fill((rank - 1) % size, step, n)
        sent = dist.isend(own, group=group, group_dst=(rank + 1) % size)
        dist.irecv(got, group=group, group_src=(rank - 1) % size).wait()
        sent.wait()
    else:
        work = dist.barrier(group, async_op=asynchronous)
    if asynchronous and work is not None:
        work.wait()
    if isinstance(got, str):
        same = all(map(torch.equal, outputs, expected))
    else:
        same = got is None or expected is None or torch.equal(got, expected)
    return None if same else f"{kind} of {n}, step {step}, root {root}, async {asynchronous}: wrong result"
