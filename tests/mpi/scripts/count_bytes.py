"""What leaves each host for one operation, counted by its network interface; the first rank of each says so."""

import json
import os
import socket
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore", FutureWarning)
S = 16 << 20
REPEAT = 4
SMALL, SMALL_REPEAT = 32 << 10, 200  # the most that goes by the first ranks of these hosts


def sent():
    with open("/proc/self/net/dev") as f:  # of this network namespace, unlike /sys
        return int(next(line for line in f if "eth0:" in line).split(":")[1].split()[8])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("custom")
    n = dist.get_world_size()
    small, whole, part = torch.zeros(SMALL // 4), torch.zeros(S // 4), torch.zeros(S // 4 // n)
    operations = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "small all_reduce": lambda: dist.all_reduce(small),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(whole, whole.clone()),
    }
    found = {}
    for name, operation in operations.items():
        size, repeat = (SMALL, SMALL_REPEAT) if name.startswith("small") else (S, REPEAT)
        operation()
        dist.barrier()
        before = sent()
        dist.barrier()
        for _ in range(repeat):
            operation()
        dist.barrier()
        found[name] = (sent() - before) / repeat / size
        dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        print(json.dumps({"rank": dist.get_rank(), "host": socket.gethostname(), "sent": found}), flush=True)
    dist.destroy_process_group()


main()
