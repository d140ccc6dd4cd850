#!/usr/bin/env python
"""Article 001, example 8: DDP with a checkpoint saved by one process.

Differs from the article:
- the backend name comes from C10D_TEST_BACKEND, and MASTER_PORT may be given
  by the caller;
- lines that the article's text lost (torch.save, torch.load, the loss call)
  are put back from the PyTorch tutorial that it follows;
- the model stays on the CPU and DDP gets no device_ids (see ddp_basic.py), so
  that map_location maps nothing: it is 'cpu';
- the checkpoint's file name carries the port, as two test runs may share the
  temporary folder;
- before loading, every process but 0 spoils its parameters: if the barrier
  did not hold back the load, or the load did nothing, the numbers show it;
  a JSON line reports them.
"""
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
import torch.multiprocessing as mp

from torch.nn.parallel import DistributedDataParallel as DDP

BACKEND = os.environ.get('C10D_TEST_BACKEND', 'custom')


def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ.setdefault('MASTER_PORT', '12355')
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size)
    torch.manual_seed(42)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def parameter_sum(model):
    return sum(p.detach().double().sum().item() for p in model.parameters())


def demo_checkpoint(rank, world_size):
    setup(rank, world_size)

    model = ToyModel()
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    CHECKPOINT_PATH = tempfile.gettempdir() + "/model.checkpoint." + os.environ['MASTER_PORT']
    initial = parameter_sum(ddp_model)
    if rank == 0:
        # All processes should see same parameters as they all start from same
        # random parameters and gradients are synchronized in backward passes.
        # Therefore, saving it in one process is sufficient.
        time.sleep(0.5)  # a late writer: without the barrier the others find no file
        torch.save(ddp_model.state_dict(), CHECKPOINT_PATH)
    else:
        with torch.no_grad():
            for p in ddp_model.parameters():
                p.fill_(float(rank))

    # Use a barrier() to make sure that process 1 loads the model after process
    # 0 saves it.
    dist.barrier()
    # configure map_location properly
    map_location = 'cpu'
    ddp_model.load_state_dict(
        torch.load(CHECKPOINT_PATH, map_location=map_location))
    loaded = parameter_sum(ddp_model)

    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 5)
    loss_fn = nn.MSELoss()
    loss_fn(outputs, labels).backward()
    optimizer.step()

    # Use a barrier() to make sure that all processes have finished reading the
    # checkpoint
    dist.barrier()

    if rank == 0:
        os.remove(CHECKPOINT_PATH)

    print(json.dumps({
        'rank': rank,
        'initial': initial,
        'loaded': loaded,
        'final': parameter_sum(ddp_model),
    }), flush=True)
    cleanup()


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn,
             args=(world_size,),
             nprocs=world_size,
             join=True)


if __name__ == "__main__":
    run_demo(demo_checkpoint, 2)
