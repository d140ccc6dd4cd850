"""late_news.py FOLDER HOW: rank 3, of two hosts, dies amid a call. Rank 1 learns it from its neighbour alone, in their
shared memory: its own failure detector's news is too late to count. All ranks that are left end in order."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from c10d_custom.transport.hosts.failure_detector import FailureDetector


def main(folder, how):
    dist.init_process_group("custom")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        FailureDetector._fail = lambda *news: None
    dist.all_reduce(torch.ones(3))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(torch.ones(50_000))
    except RuntimeError as error:
        (folder / str(rank)).write_text(type(error).__name__)
    if how == "aborts":
        dist.group.WORLD.abort()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
