#!/usr/bin/env python
"""Article 001, example 6: DistributedDataParallel, started with mp.spawn.

Differs from the article:
- the backend name comes from C10D_TEST_BACKEND, and MASTER_PORT may be given
  by the caller;
- the article takes device_ids from torch.cuda.device_count() // world_size;
  the backend under test serves CPU tensors, so that the model stays on the
  CPU and DDP gets no device_ids (its CPU form);
- each process draws its batch from its own seed, so that averaging has
  something to average, and prints a JSON line with its own gradient, the
  averaged one and the updated parameters.
"""
import copy
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

    # initialize the process group
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size)

    # Explicitly setting seed to make sure that models created in two processes
    # start from same random weights and biases.
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


def demo_basic(rank, world_size):
    setup(rank, world_size)

    model = ToyModel()
    alone = copy.deepcopy(model)
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    torch.manual_seed(100 + rank)
    inputs = torch.randn(20, 10)
    labels = torch.randn(20, 5)

    optimizer.zero_grad()
    outputs = ddp_model(inputs)
    loss_fn(outputs, labels).backward()
    optimizer.step()

    loss_fn(alone(inputs), labels).backward()
    print(json.dumps({
        'rank': rank,
        'own_grad': alone.net2.bias.grad.tolist(),
        'ddp_grad': ddp_model.module.net2.bias.grad.tolist(),
        'before': alone.net2.bias.tolist(),
        'after': ddp_model.module.net2.bias.tolist(),
        'sum': sum(p.double().sum().item() for p in ddp_model.parameters()),
    }), flush=True)
    cleanup()


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn,
             args=(world_size,),
             nprocs=world_size,
             join=True)


if __name__ == "__main__":
    run_demo(demo_basic, 2)
