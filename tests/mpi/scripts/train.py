#!/usr/bin/env python
"""An ordinary DDP script: nothing in it knows of mpirun, hosts or ranks but what torch.distributed tells."""

import hashlib
import json
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group(os.environ.get("C10D_TEST_BACKEND", "custom"))
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.Generator().manual_seed(100 + rank)
for _ in range(5):
    x, y = torch.randn(16, 64, generator=data), torch.randn(16, 8, generator=data)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
sys.stdout.write(
    json.dumps(
        {
            "rank": rank,
            "size": size,
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "host": socket.gethostname(),
            "digest": digest.hexdigest(),
        }
    )
    + "\n"
)
dist.destroy_process_group()
