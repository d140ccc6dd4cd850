"""A rank of a launcher's job that is in three groups one after the other, made by dist._reconfigure: of all ranks, of
all but rank 0, of all in reverse."""

import json
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("custom", enable_reconfigure=True, timeout=timedelta(seconds=90))
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
store.set(f"handle of {rank}", dist._get_reconfigure_handle())
handles = [store.get(f"handle of {i}").decode() for i in range(size)]
said = []
for number, members in enumerate((list(range(size)), list(range(1, size)), list(reversed(range(size))))):
    if rank in members:
        dist._reconfigure(number, [handles[i] for i in members]).wait()
        total = torch.tensor([rank])
        dist.all_reduce(total)
        said.append([dist.get_rank(), dist.get_world_size(), total.item()])
print(json.dumps({"rank": rank, "said": said}), flush=True)
dist.destroy_process_group()
