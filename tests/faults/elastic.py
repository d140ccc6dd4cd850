"""What torchrun restarts: DDP from a checkpoint; in the first attempt a rank kills itself in the middle of a step.

torchrun --nproc-per-node 2 --max-restarts 1 tests/faults/elastic.py FOLDER
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import bits, loss_of, new_model, optimizer_of, state

STEPS = 30
ATTEMPT, RANK, STEP = 0, 1, 17  # of the death


def main():
    checkpoint = Path(sys.argv[1], "checkpoint")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group("custom", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = new_model()
    optimizer = optimizer_of(model)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        for mine, its in zip(state(model, optimizer), saved["state"]):
            mine.copy_(its)
    began_at = step
    model[2].weight.register_hook(
        lambda _: os.kill(os.getpid(), signal.SIGKILL) if (attempt, rank, step) == (ATTEMPT, RANK, STEP) else None
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    while step < STEPS:
        optimizer.zero_grad()
        loss_of(ddp, rank, dist.get_world_size(), step).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            torch.save({"step": step, "state": state(model, optimizer)}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)
    sys.stdout.write(json.dumps({"rank": rank, "attempt": attempt, "began_at": began_at, "bits": bits(model)}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
