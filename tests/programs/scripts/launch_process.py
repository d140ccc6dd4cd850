#!/usr/bin/env python
"""Every way of starting processes and of finding the others, one body.

    launch_process.py START_METHOD INIT SIZE SCRATCH_FOLDER

START_METHOD is fork, spawn or forkserver; INIT is env, tcp, file, tcpstore or
filestore. Each process prints one JSON line. Article 001 names the two kinds of
init_process_group call: a URL, or store, rank and world_size.
"""
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BACKEND = os.environ.get('C10D_TEST_BACKEND', 'custom')


def initialise(init, rank, size, folder):
    timeout = timedelta(seconds=30)
    port = os.environ['MASTER_PORT']
    if init == 'env':
        os.environ.update(MASTER_ADDR='127.0.0.1', RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group(BACKEND, init_method='env://', timeout=timeout)
    elif init == 'tcp':
        dist.init_process_group(BACKEND, init_method='tcp://127.0.0.1:' + port, rank=rank, world_size=size,
                                timeout=timeout)
    elif init == 'file':
        dist.init_process_group(BACKEND, init_method='file://' + os.path.join(folder, 'rendezvous'), rank=rank,
                                world_size=size, timeout=timeout)
    elif init == 'tcpstore':
        store = dist.TCPStore('127.0.0.1', int(port), size, rank == 0, timeout)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)
    elif init == 'filestore':
        store = dist.FileStore(os.path.join(folder, 'store'), size)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        raise ValueError(init)


def main(rank, init, size, folder):
    initialise(init, rank, size, folder)
    total = torch.arange(5) + rank
    dist.all_reduce(total)
    gathered = [None] * size
    dist.all_gather_object(gathered, {'rank': rank, 'pid': os.getpid()})
    right = torch.full((3,), float(rank))
    left = torch.empty(3)
    if size == 1:
        # A rank cannot be its own peer in point-to-point calls.
        left.copy_(right)
    else:
        work = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, right, (rank + 1) % size),
            dist.P2POp(dist.irecv, left, (rank - 1) % size),
        ])
        for w in work:
            w.wait()
    dist.barrier()
    print(json.dumps({
        'rank': dist.get_rank(),
        'size': dist.get_world_size(),
        'total': total.tolist(),
        'ranks': [g['rank'] for g in gathered],
        'processes': len({g['pid'] for g in gathered}),
        'left': left.tolist(),
    }), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    start_method, init, size, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    context = mp.get_context(start_method)
    processes = [context.Process(target=main, args=(rank, init, size, folder)) for rank in range(size)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    sys.exit(max(abs(p.exitcode) for p in processes))
