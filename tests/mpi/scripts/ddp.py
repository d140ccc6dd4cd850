"""An ordinary DDP script for torchrun: nothing in it knows of MPI."""

import hashlib
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group(os.environ.get("C10D_TEST_BACKEND", "custom"))
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(10, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 10)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(json.dumps({"rank": dist.get_rank(), "local_rank": local_rank, "digest": digest}), flush=True)
dist.destroy_process_group()
