#!/usr/bin/env python
"""Article 001, example 7: DDP over a model that spans two devices.

Differs from the article:
- the backend name comes from C10D_TEST_BACKEND, and MASTER_PORT may be given
  by the caller;
- lines that the article's text lost (setup, the loss call, run_demo) are put
  back from the PyTorch tutorial that it follows;
- with two GPUs or more there is one process for each pair of GPUs (the
  article assumes eight GPUs and four processes); with fewer, four processes
  run the same code with both halves of the model on the CPU;
- a JSON line reports devices and the sum of the updated parameters.
"""
import json
import os

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


class ToyMpModel(nn.Module):
    def __init__(self, dev0, dev1):
        super(ToyMpModel, self).__init__()
        self.dev0 = dev0
        self.dev1 = dev1
        self.net1 = torch.nn.Linear(10, 10).to(dev0)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 5).to(dev1)

    def forward(self, x):
        x = x.to(self.dev0)
        x = self.relu(self.net1(x))
        x = x.to(self.dev1)
        return self.net2(x)


def demo_model_parallel(rank, world_size):
    setup(rank, world_size)

    # setup mp_model and devices for this process
    if torch.cuda.device_count() >= 2:
        dev0 = rank * 2
        dev1 = rank * 2 + 1
    else:
        dev0 = dev1 = 'cpu'
    mp_model = ToyMpModel(dev0, dev1)
    ddp_mp_model = DDP(mp_model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_mp_model.parameters(), lr=0.001)

    optimizer.zero_grad()
    # outputs will be on dev1
    outputs = ddp_mp_model(torch.randn(20, 10))
    labels = torch.randn(20, 5).to(dev1)
    loss_fn(outputs, labels).backward()
    optimizer.step()

    print(json.dumps({
        'rank': rank,
        'world_size': world_size,
        'devices': sorted({str(p.device) for p in ddp_mp_model.parameters()}),
        'sum': sum(p.double().sum().item() for p in ddp_mp_model.parameters()),
    }), flush=True)
    cleanup()


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn,
             args=(world_size,),
             nprocs=world_size,
             join=True)


if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    run_demo(demo_model_parallel, gpus // 2 if gpus >= 2 else 4)
