"""The operations the benchmark times: what each rank calls, and how many bytes its bus carries.

busbw is nccl-tests' (its doc/PERFORMANCE.md): algbw times the factor that makes the figure comparable
with the speed of the hardware whatever the number of ranks.
"""
from dataclasses import dataclass
from typing import Callable

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Operation:
    """``make(count, rank, size)`` gives a function of a group that does one operation on ``count``
    float32 elements; ``bus_factor(size)`` turns algbw into busbw. size column: bytes of the largest buffer."""
    make: Callable
    bus_factor: Callable


def _all_reduce(count, rank, size):
    t = torch.zeros(count)
    return lambda group: dist.all_reduce(t, group=group)


def _all_reduce_async(count, rank, size):
    t = torch.zeros(count)
    return lambda group: dist.all_reduce(t, group=group, async_op=True).wait()


def _broadcast(count, rank, size):
    t = torch.zeros(count)
    return lambda group: dist.broadcast(t, group=group, group_src=0)


def _reduce(count, rank, size):
    t = torch.zeros(count)
    return lambda group: dist.reduce(t, group=group, group_dst=0)


def _all_gather(count, rank, size):
    part = torch.zeros(max(1, count // size))
    whole = torch.empty(part.numel() * size)
    return lambda group: dist.all_gather_into_tensor(whole, part, group=group)


def _reduce_scatter(count, rank, size):
    part = torch.zeros(max(1, count // size))
    whole = torch.zeros(part.numel() * size)
    return lambda group: dist.reduce_scatter_tensor(part, whole, group=group)


def _all_to_all(count, rank, size):
    each = max(1, count // size)
    source, target = torch.zeros(each * size), torch.empty(each * size)
    return lambda group: dist.all_to_all_single(target, source, group=group)


def _gather(count, rank, size):
    part = torch.zeros(max(1, count // size))
    parts = [torch.empty_like(part) for _ in range(size)] if rank == 0 else None
    return lambda group: dist.gather(part, parts, group=group, group_dst=0)


def _scatter(count, rank, size):
    part = torch.zeros(max(1, count // size))
    parts = [torch.zeros_like(part) for _ in range(size)] if rank == 0 else None
    return lambda group: dist.scatter(part, parts, group=group, group_src=0)


def _send_recv(count, rank, size):
    t = torch.zeros(count)

    def ping_pong(group):
        # Half a round trip each way between ranks 0 and 1; the others look on.
        if rank == 0:
            dist.send(t, group=group, group_dst=1)
            dist.recv(t, group=group, group_src=1)
        elif rank == 1:
            dist.recv(t, group=group, group_src=0)
            dist.send(t, group=group, group_dst=0)
    return ping_pong


def _rooted(size):
    return (size - 1) / size


OPERATIONS = {
    "all_reduce": Operation(_all_reduce, lambda n: 2 * (n - 1) / n),
    "all_reduce_async": Operation(_all_reduce_async, lambda n: 2 * (n - 1) / n),
    "broadcast": Operation(_broadcast, lambda n: 1),
    "reduce": Operation(_reduce, lambda n: 1),
    "all_gather": Operation(_all_gather, _rooted),
    "reduce_scatter": Operation(_reduce_scatter, _rooted),
    "all_to_all": Operation(_all_to_all, _rooted),
    "gather": Operation(_gather, _rooted),
    "scatter": Operation(_scatter, _rooted),
    "send_recv": Operation(_send_recv, lambda n: 2),
}
