"""dies_at_its_end.py FOLDER: rank 3, of two hosts, dies after the others have come to their ends, where they may wait
for it; rank 0, in a call with it, hears of that, and ranks 1 and 2 do not."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from c10d_custom.errors import PeerLostError


def main(folder):
    dist.init_process_group("custom")
    rank = dist.get_rank()
    group = dist.new_group([0, 3])
    dist.all_reduce(torch.ones(3))
    if rank in (0, 3):
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        time.sleep(2)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except PeerLostError as error:
            print(f"rank 0: {error}", flush=True)
    (folder / str(rank)).touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
