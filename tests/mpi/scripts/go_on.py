"""All ranks see a time-out, go on without the group, and end one after the other: go_on.py FOLDER"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveTimeoutError

dist.init_process_group("custom")
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group()
group.set_timeout(timedelta(seconds=1))
if rank == size - 1:
    time.sleep(2.5)
try:
    dist.all_reduce(torch.ones(3), group=group)
except CollectiveTimeoutError:
    dist.destroy_process_group()
    time.sleep(0.7 * rank)
    (Path(sys.argv[1]) / f"done.{rank}").touch()
