#!/usr/bin/env python
"""Started by torchrun: all that the process group needs is in the environment.

    launch_torchrun.py [FAIL_FOLDER before|after]

With FAIL_FOLDER, rank 1 fails once, before it joins the group or after the
group has already been used, and the launcher is to start all ranks again
(--max-restarts): `attempt` in the JSON line tells how many starts there were.
"""
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

BACKEND = os.environ.get('C10D_TEST_BACKEND', 'custom')


def main():
    folder, when = sys.argv[1:] if len(sys.argv) > 1 else (None, None)
    if when == 'before' and os.environ['RANK'] == '1' and not os.path.exists(os.path.join(folder, 'failed-once')):
        open(os.path.join(folder, 'failed-once'), 'w').close()
        # Rank 0 is to be in the midst of init_process_group, its keys in the store.
        time.sleep(3)
        sys.exit(3)

    # A rank that takes part in the wrong attempt is to fail, not to wait for half an hour.
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)

    if when == 'after':
        marker = os.path.join(folder, 'failed-once')
        first_time = not os.path.exists(marker)
        dist.barrier()
        if rank == 1 and first_time:
            open(marker, 'w').close()
            sys.exit(3)
        if first_time:
            # Stay inside a collective, as a training loop would, while rank 1 dies.
            dist.all_reduce(total)

    # One write: torchrun's workers are unbuffered, and print would write the line end apart.
    sys.stdout.write(json.dumps({
        'rank': rank,
        'size': size,
        'local_rank': int(os.environ['LOCAL_RANK']),
        'attempt': int(os.environ['TORCHELASTIC_RESTART_COUNT']),
        'total': total.item(),
    }) + '\n')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
