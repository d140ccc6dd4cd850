"""Steps that can be checked, with a checkpoint after each; a rank kills itself once: elastic.py FOLDER VICTIM"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder, victim = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("custom")
rank = dist.get_rank()
checkpoint = folder / "checkpoint"
step, w = torch.load(checkpoint) if checkpoint.exists() else (0, torch.arange(300_000))
first = step
while step < 6:
    if not (folder / "died").exists() and step == 3 and rank == victim:
        (folder / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    g = (w * (rank + 2) + step) % 1009
    try:
        dist.all_reduce(g)
    except dist.DistBackendError as error:
        seconds = time.time() - float((folder / "died").read_text())
        lost = {"rank": rank, "error": type(error).__name__, "text": str(error), "seconds": seconds}
        (folder / f"lost.{rank}").write_text(json.dumps(lost))
        raise
    w, step = (w + g) % 1009, step + 1
    if rank == 0:
        torch.save((step, w), folder / "new")
        os.replace(folder / "new", checkpoint)
    dist.barrier()
(folder / f"done.{rank}").write_text(json.dumps({"first": first, "w": w.tolist()}))
dist.destroy_process_group()
