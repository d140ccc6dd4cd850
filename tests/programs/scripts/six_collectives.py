#!/usr/bin/env python
"""Article 001, the six collectives after example 3, with the article's arguments.

Differs from the article, which gives signatures and no program: each signature
is called once with every named argument it lists (blocking, then, where the
signature has async_op, asynchronous), over four processes, in the default
group and in a group whose ranks are not sorted; results go to one JSON line
per process. Backend name and MASTER_PORT as in the other programs.
"""
import json
import os

import torch
import torch.distributed as dist
from torch.multiprocessing import Process

BACKEND = os.environ.get('C10D_TEST_BACKEND', 'custom')


def six(rank, ranks, group):
    """ The six collectives over `ranks`; ranks[0] is the root. """
    root = ranks[0]
    n = len(ranks)
    results = {}

    for async_op in (False, True):
        name = '_async' if async_op else ''

        tensor = torch.zeros(2)
        scatter_list = None
        if rank == root:
            scatter_list = [torch.full((2,), 10.0 + i) for i in range(n)]
        work = dist.scatter(tensor, scatter_list=scatter_list, src=root, group=group, async_op=async_op)
        if async_op:
            work.wait()
        results['scatter' + name] = tensor.tolist()

        tensor = torch.full((2,), 20.0 + rank)
        gather_list = [torch.zeros(2) for _ in range(n)] if rank == root else None
        work = dist.gather(tensor, gather_list=gather_list, dst=root, group=group, async_op=async_op)
        if async_op:
            work.wait()
        results['gather' + name] = [t.tolist() for t in gather_list] if rank == root else None

    tensor = torch.full((2,), 1.0 + rank)
    dist.reduce(tensor, root, dist.reduce_op.SUM, group)
    # Only the root's tensor is defined after reduce.
    results['reduce'] = tensor.tolist() if rank == root else None

    tensor = torch.full((2,), 1.0 + rank)
    dist.all_reduce(tensor, dist.reduce_op.PRODUCT, group)
    results['all_reduce'] = tensor.tolist()

    tensor = torch.full((2,), 30.0 + rank)
    dist.broadcast(tensor, root, group)
    results['broadcast'] = tensor.tolist()

    tensor = torch.full((2,), 40.0 + rank)
    tensor_list = [torch.zeros(2) for _ in range(n)]
    dist.all_gather(tensor_list, tensor, group)
    results['all_gather'] = [t.tolist() for t in tensor_list]
    return results


def run(rank, size):
    world = six(rank, list(range(size)), dist.group.WORLD)
    # new_group sorts the ranks unless told otherwise; rank 0 is not in this one.
    subgroup = dist.new_group([3, 1, 2])
    part = six(rank, [1, 2, 3], subgroup) if rank != 0 else None
    print(json.dumps({'rank': rank, 'world': world, 'subgroup': part}))
    # Process 0 serves the store that the others still need to build the subgroup.
    dist.barrier()


def init_process(rank, size, fn, backend=BACKEND):
    """ Initialize the distributed environment. """
    os.environ['MASTER_ADDR'] = '127.0.0.1'
    os.environ.setdefault('MASTER_PORT', '29500')
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    size = 4
    processes = []
    for rank in range(size):
        p = Process(target=init_process, args=(rank, size, run))
        p.start()
        processes.append(p)

    for p in processes:
        p.join()
