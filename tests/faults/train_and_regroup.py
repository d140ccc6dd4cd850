"""A DDP training that loses one of its 3 ranks, goes on with 2, and takes another process in, which gets all it needs
by broadcasts. Needs torch 2.15.

python tests/faults/train_and_regroup.py FOLDER [--torchrun]     (prints JSON)

A supervisor (a scheduler, a person) decides who trains: it writes plans, each a number and the handles of the members,
to FOLDER. Workers look for a newer plan after each step, and when one of them is lost. With --torchrun each worker has
a torchrun of its own, which starts another in the place of the one that is lost: no other is restarted."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import bits, loss_of, new_model, optimizer_of, reference, state

STEPS, FATAL_STEP, JOINING_STEP = 60, 17, 40


# --- a worker


class Worker:
    def __init__(self, folder, name):
        self.folder, self.plan, self.step, self.history = folder, 0, 0, []
        self.model = new_model()
        self.optimizer = optimizer_of(self.model)
        own = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("custom", enable_reconfigure=True, timeout=timedelta(seconds=60), **own)
        self.handle = dist._get_reconfigure_handle()
        write(folder / f"handle-{name}", self.handle)

    def newest_plan(self):
        """Of those that this process is in."""
        plans = {
            int(path.name.removeprefix("plan-")): json.loads(path.read_text()) for path in self.folder.glob("plan-?")
        }
        return max((number for number, members in plans.items() if self.handle in members), default=0)

    def regroup(self):
        """With the members of a newer plan, once there is one."""
        while (newest := self.newest_plan()) == self.plan:
            time.sleep(0.02)
        self.plan = newest
        dist._reconfigure(newest, json.loads((self.folder / f"plan-{newest}").read_text())).wait()
        # Some may have taken a step that others have not, and who is new none: all go on from one that is furthest.
        steps = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(steps, torch.tensor(self.step))
        self.step = int(max(steps))
        for tensor in state(self.model, self.optimizer):
            dist.broadcast(tensor, steps.index(max(steps)))
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.0005)
        self.history.append((self.step, dist.get_world_size()))

    def train(self):
        self.regroup()
        while self.step < STEPS:
            try:
                loss = loss_of(self.ddp, dist.get_rank(), dist.get_world_size(), self.step)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                while self.step == JOINING_STEP and self.newest_plan() == self.plan:
                    time.sleep(0.02)  # so that the example always goes the same way: a training need not wait
                newest = torch.tensor(self.newest_plan())
                dist.all_reduce(newest, dist.ReduceOp.MAX)  # all hear of a plan after the same step
                changed = newest > self.plan
            except RuntimeError:  # out of a backward pass every error comes as one
                (self.folder / "lost").touch()
                changed = True
            if changed:
                self.regroup()
        return {"history": self.history, "bits": bits(self.model), "loss": loss.item()}


def work(folder, name):
    worker = Worker(folder, name)
    if name == "victim":
        dies = lambda _: os.kill(os.getpid(), signal.SIGKILL) if worker.step == FATAL_STEP else None  # noqa: E731
        worker.model[2].weight.register_hook(dies)
    write(folder / f"result-{name}", json.dumps(worker.train()))
    dist.destroy_process_group()


# --- the supervisor


def write(path, text):
    (part := path.with_suffix(".part")).write_text(text)
    part.rename(path)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--monitor-interval", "0.1"]


def supervise(folder, launcher):
    def start(name):
        processes[name] = subprocess.Popen([sys.executable, *launcher, __file__, folder, name])

    def await_file(name):
        while not (folder / name).exists():
            time.sleep(0.02)

    def plan(number, *names):
        for name in names:
            await_file(f"handle-{name}")
        handles = [(folder / f"handle-{name}").read_text() for name in names]
        write(folder / f"plan-{number}", json.dumps(handles))

    processes = {}
    for name in ("first", "victim", "second"):
        start(name)
    plan(1, "first", "victim", "second")
    await_file("lost")
    plan(2, "first", "second")
    if not launcher:
        start("new")
    plan(3, "first", "second", "new")
    codes = {name: process.wait() for name, process in processes.items()}
    results = {path.name.removeprefix("result-"): json.loads(path.read_text()) for path in folder.glob("result-*")}
    history = results["first"]["history"]
    undisturbed = reference(STEPS, lambda step: [size for began, size in history if began <= step][-1])
    print(json.dumps({"codes": codes, "results": results, "undisturbed": undisturbed}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, what = Path(sys.argv[1]), (sys.argv[2:] or [""])[0]
    if what in ("", "--torchrun"):
        supervise(folder, TORCHRUN if what else [])
    else:
        work(folder, "new" if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else what)
