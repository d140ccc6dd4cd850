#!/usr/bin/env python
"""Article 001, example 2: non-blocking point-to-point communication.

Differs from the article: the backend name comes from C10D_TEST_BACKEND, and
MASTER_PORT may be given by the caller. The launcher is the one of example 1.
"""
import os

import torch
import torch.distributed as dist
from torch.multiprocessing import Process

BACKEND = os.environ.get('C10D_TEST_BACKEND', 'custom')

"""Non-blocking point-to-point communication."""


def run(rank, size):
    tensor = torch.zeros(1)
    req = None
    if rank == 0:
        tensor += 1
        # Send the tensor to process 1
        req = dist.isend(tensor=tensor, dst=1)
        print('Rank 0 started sending')
    else:
        # Receive tensor from process 0
        req = dist.irecv(tensor=tensor, src=0)
        print('Rank 1 started receiving')
    req.wait()
    print('Rank ', rank, ' has data ', tensor[0])


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
