"""A training that can be checked: steps on from its checkpoint until it is told to stop, and says what it meets.

steps_on.py FOLDER SECONDS: ``SECONDS`` is the groups' time-out. In FOLDER: ``checkpoint``; ``stop``, once somebody
wants the end; ``fail``, with a rank that is to fail once before its first group; ``said/HOST-PID``, lines of JSON, each
with the time (of the clock that all hosts of a rig share)."""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SIZE = 50_000  # of 8 bytes: the way of large tensors
PAUSE = 0.02  # s, after each step: what else is under way on this machine may be what is waited for


def step_on(w, step, ranks):
    """What the step after ``step`` makes of w, if each rank's share were computed here."""
    return (w + sum((w * (rank + 2) + step) % 1009 for rank in range(ranks))) % 1009


class Worker:
    def __init__(self, folder):
        self.folder = folder
        self._said = folder / "said" / f"{socket.gethostname()}-{os.getpid()}"

    def say(self, **what):
        with open(self._said, "a") as f:
            f.write(json.dumps({"time": time.monotonic(), **what}) + "\n")

    def run(self, seconds):
        self.say(event="started")
        fail = self.folder / "fail"
        if fail.exists() and fail.read_text() == os.environ["RANK"]:
            while len(list((self.folder / "said").iterdir())) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.05)
            time.sleep(1)  # the others are to be in init_process_group, their keys in the store
            fail.unlink()
            sys.exit(3)
        try:
            dist.init_process_group("custom", timeout=timedelta(seconds=seconds))
            self._steps()
        except Exception as error:
            self.say(event="error", kind=type(error).__name__, text=str(error))
            raise
        dist.destroy_process_group()
        self.say(event="done")

    def _steps(self):
        rank, size, checkpoint = dist.get_rank(), dist.get_world_size(), self.folder / "checkpoint"
        first = step = 0
        w = torch.arange(SIZE)
        if checkpoint.exists():
            step, w = torch.load(checkpoint)
            first = step
        # Rank 0 may have saved one more step before another has read.
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(steps, torch.tensor([step]))
        if len({int(s) for s in steps}) > 1:
            raise AssertionError(f"ranks begin with steps {steps}")
        while True:
            small, large = torch.tensor([step, rank]), (w * (rank + 2) + step) % 1009
            dist.all_reduce(small)
            dist.all_reduce(large)
            if small.tolist() != [step * size, size * (size - 1) // 2]:
                raise AssertionError(f"step {step}: {small}")
            expected = step_on(w, step, size)
            w, step = (w + large) % 1009, step + 1
            if not torch.equal(w, expected):
                raise AssertionError(f"step {step - 1}: wrong result")
            if rank == 0:
                torch.save((step, w), self.folder / "new")
                os.replace(self.folder / "new", checkpoint)
            if step == first + 1:
                self.say(event="up", rank=rank, size=size, first=first)
            stop = torch.tensor([(self.folder / "stop").exists()], dtype=torch.uint8)
            dist.broadcast(stop, 0)
            if stop:
                return
            time.sleep(PAUSE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Worker(Path(sys.argv[1])).run(float(sys.argv[2]))
