#!/usr/bin/env python
"""Article 001, example 1: start two processes and join them in a process group.

Differs from the article:
- the backend name comes from C10D_TEST_BACKEND, and MASTER_PORT may be given
  by the caller, so that two test runs on one machine do not share a port;
- the article's `run` is empty; here it reports, in one JSON line, what the
  process group says about itself.
"""
import json
import os

import torch
import torch.distributed as dist
from torch.multiprocessing import Process

BACKEND = os.environ.get('C10D_TEST_BACKEND', 'custom')


def run(rank, size):
    """ Distributed function to be implemented later. """
    print(json.dumps({
        'rank': dist.get_rank(),
        'size': dist.get_world_size(),
        'backend': dist.get_backend(),
        'initialized': dist.is_initialized(),
        'tensor_device': str(torch.zeros(1).device),
    }))


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
