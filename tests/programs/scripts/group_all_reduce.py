#!/usr/bin/env python
"""Article 001, example 3: all_reduce over a group.

Differs from the article: the backend name comes from C10D_TEST_BACKEND, and
MASTER_PORT may be given by the caller. The launcher is the one of example 1.
`dist.reduce_op` is kept: it is deprecated but still present (checked with
torch 2.13, where it warns). The article lists four operators; all are run.
"""
import os

import torch
import torch.distributed as dist
from torch.multiprocessing import Process

BACKEND = os.environ.get('C10D_TEST_BACKEND', 'custom')

""" All-Reduce example."""


def run(rank, size):
    """ Simple point-to-point communication. """
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.reduce_op.SUM, group=group)
    print('Rank ', rank, ' has data ', tensor[0])

    for name in ('SUM', 'PRODUCT', 'MAX', 'MIN'):
        tensor = torch.tensor([rank + 2.0])
        dist.all_reduce(tensor, op=getattr(dist.reduce_op, name), group=group)
        print('Rank ', rank, ' has ', name, ' ', tensor[0])


def init_process(rank, size, fn, backend=BACKEND):
    """ Initialize the distributed environment. """
    os.environ['MASTER_ADDR'] = '127.0.0.1'
    os.environ.setdefault('MASTER_PORT', '29500')
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    size = 2
    processes = []
    for rank in range(size):
        p = Process(target=init_process, args=(rank, size, run))
        p.start()
        processes.append(p)

    for p in processes:
        p.join()
