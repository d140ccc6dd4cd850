"""Two groups of the same ranks at once: rank 0 says in milliseconds how long calls take alone and beside the other
group's. two_groups.py BYTES"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

COUNT = 20
torch.set_num_threads(1)
dist.init_process_group("custom")
other = dist.new_group()
large, more, small = (torch.ones(int(n) // 4) for n in (sys.argv[1], sys.argv[1], 4))


def ms(call):
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def call_small():
    dist.all_reduce(small, group=other)


def both():
    works = [dist.all_reduce(large, async_op=True), dist.all_reduce(more, group=other, async_op=True)]
    for work in works:
        work.wait()


def beside(found):
    work = dist.all_reduce(large, async_op=True)
    for _ in range(COUNT):
        found.append((ms(call_small), work.is_completed()))
    work.wait()


both()
alone = statistics.median(ms(lambda: dist.all_reduce(large)) for _ in range(5))
small_alone = statistics.median(ms(call_small) for _ in range(50))
at_once = statistics.median(ms(both) for _ in range(5))
found = []
for _ in range(5):
    dist.barrier()
    beside(found)
during = [took for took, over in found if not over]
said = {
    "rank": dist.get_rank(),
    "large alone": alone,
    "two large at once": at_once,
    "small alone": small_alone,
    "small beside large": statistics.median(during) if during else None,
    "smalls beside each large": len(during) / 5,
}
if dist.get_rank() == 0:
    os.write(1, f"{json.dumps(said)}\n".encode())
dist.destroy_process_group()
