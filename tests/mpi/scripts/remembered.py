"""What a rank of a group over several hosts remembers of its calls, whichever way they went."""

import json

import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveMismatchError

dist.init_process_group("custom")
rank = dist.get_rank()
group = dist.new_group()
transport = group.cpu_transport
small, large = torch.ones(4), torch.ones(1 << 16)
for _ in range(300):
    dist.all_reduce(small, group=group)
dist.all_reduce(small, dist.ReduceOp.MAX, group=group)
dist.barrier(group=group)
dist.all_reduce(large, group=group)
dist.all_reduce(small, group=group, async_op=True).wait()
dist.all_reduce(small, group=group)
if rank < 2:
    (dist.send if rank else dist.recv)(small, 1 - rank, group=group)
before = [
    (
        r.operation,
        r.number,
        r.reduce,
        r.dtype,
        r.count,
        r.in_bytes,
        r.state,
        r.issued <= (r.began or r.issued) <= r.ended,
    )
    for r in transport.trace()
]
try:
    dist.all_reduce(torch.ones(5 if rank else 4), group=group)
except CollectiveMismatchError:
    pass
last = [r for r in transport.trace() if not r.is_message][-1]
print(json.dumps({"rank": rank, "before": before, "last": (last.number, last.count, last.state)}), flush=True)
dist.destroy_process_group()
