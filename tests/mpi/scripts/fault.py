"""One kind of trouble, in a group over several hosts: every rank says what it was told, in a file of its
own (launchers lose what is printed while they end a job)."""
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

GROUP_SECONDS = 4.0
MEDIUM = 4000   # float32: 16 KB, still a small all_reduce


def all_reduce(count, op=dist.ReduceOp.SUM, dtype=torch.float32):
    dist.all_reduce(torch.ones(count, dtype=dtype), op)


def forever(count):
    while True:
        all_reduce(count)


def trouble(kind, rank, last):
    """What this rank does. It raises something, or returns."""
    if kind == "killed idle":
        if rank == last:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(4)
    elif kind in ("killed small", "killed leader", "killed large"):
        if rank == (last - 1 if kind == "killed leader" else last):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        forever({"killed small": 4, "killed large": 1 << 20}.get(kind, MEDIUM))
    elif kind == "killed first":
        if rank == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(4)
    elif kind == "message":
        if rank == last:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            dist.recv(torch.ones(4), last)
        else:
            dist.recv(torch.ones(4), 0)
    elif kind == "count":
        all_reduce(4 if rank else 5)
    elif kind == "small and large":
        all_reduce(4 if rank % 2 else 1 << 20)
    elif kind == "small and medium":
        all_reduce(4 if rank % 2 else MEDIUM)
    elif kind == "medium and large":
        all_reduce(1 << 20 if rank == last else MEDIUM)
    elif kind == "medium":
        all_reduce(MEDIUM + (rank == last))
    elif kind == "dtype":
        all_reduce(4, dtype=torch.float32 if rank != last else torch.int32)
    elif kind == "redop":
        all_reduce(1 << 18, dist.ReduceOp.SUM if rank != last else dist.ReduceOp.MAX)
    elif kind == "operation":
        dist.barrier() if rank == last else all_reduce(4)
    elif kind == "operation, medium":
        dist.barrier() if rank == last else all_reduce(MEDIUM)
    elif kind == "refused":
        if rank == last:
            all_reduce(4, dist.ReduceOp.BAND)
        else:
            all_reduce(1 << 20)
    elif kind == "all refused":
        try:
            all_reduce(4, dist.ReduceOp.BAND)
        except ValueError:
            all_reduce(4)
            all_reduce(MEDIUM)
            all_reduce(1 << 18)
            raise
    elif kind == "late":
        if rank == last:
            time.sleep(GROUP_SECONDS + 2)
        all_reduce(4)
    elif kind == "late, large":
        if rank == last:
            time.sleep(GROUP_SECONDS + 2)
        all_reduce(1 << 20)
    elif kind == "stopped":
        if rank == last:
            wake = f"sleep {GROUP_SECONDS + 2}; kill -CONT {os.getpid()}"
            # In a session of its own: what a launcher sends to this rank's process group would end it.
            subprocess.Popen(["sh", "-c", wake], start_new_session=True, stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            os.kill(os.getpid(), signal.SIGSTOP)
        all_reduce(4)
    elif kind == "no message":
        if rank:
            time.sleep(GROUP_SECONDS + 1)
        else:
            dist.recv(torch.ones(4), last)
    elif kind == "size of a message":
        if rank == 0:
            dist.recv(torch.ones(4), last)
        if rank == last:
            dist.send(torch.ones(100000), 0) if last % 2 else dist.send(torch.ones(5), 0)
    elif kind == "left":
        if rank != last:
            all_reduce(1 << 18)
    elif kind == "aborted":
        if rank == last:
            time.sleep(0.5)
            dist.group.WORLD.abort()
        else:
            all_reduce(1 << 18)
    elif kind == "interrupted":
        def handler(*_):
            raise InterruptedError("by a signal handler")

        if rank == last:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        if rank == 0:
            time.sleep(1)
        all_reduce(4)
    elif kind == "cut":
        forever(1 << 16)


def main():
    kind = sys.argv[1]
    dist.init_process_group("custom", timeout=timedelta(seconds=GROUP_SECONDS))
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stacks = open(Path(sys.argv[2]) / f"{rank}.stacks", "w")  # of a rank that hangs; for said() in test_faults.py
    faulthandler.dump_traceback_later(20, file=stacks)
    all_reduce(4)
    dist.barrier()
    (Path(sys.argv[2]) / f"{rank}.ready").touch()
    began = time.monotonic()
    said = {"rank": rank, "error": None}
    try:
        trouble(kind, rank, last)
    except Exception as error:
        said = {"rank": rank, "error": type(error).__name__, "text": str(error)}
    said["seconds"] = time.monotonic() - began
    # At one go: the launcher may end this process in the middle of anything.
    (part := Path(sys.argv[2]) / f"{rank}.part").write_text(json.dumps(said))
    part.rename(part.with_suffix(".json"))
    dist.destroy_process_group()


main()
