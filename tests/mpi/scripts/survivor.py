"""A rank that is told, by lines on its standard input, what to do, and says what came of it: see test_shrink.py.

survivor.py FOLDER RANK,RANK...    these end amid a call, and the others shrink the group and say in FOLDER what
                                   came of it: for launchers that give ranks no standard input
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import c10d_custom


def say(**values):
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def used():
    """What the default group gives, and a group of it, in the numbers of its ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    said = {"rank": rank, "size": size}
    for count in (3, 3000, 300_000):
        x = torch.arange(count, dtype=torch.float32) * (rank + 1)
        dist.all_reduce(x)
        said[f"sum of {count}"] = bool((x == torch.arange(count) * (size * (size + 1) // 2)).all())
    got = torch.full((70_000,), -1)
    works = [dist.isend(torch.full((70_000,), rank), (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
    for work in works:
        work.wait()
    said["message"] = got.unique().tolist()
    turned = dist.new_group(list(reversed(range(size))))
    told = [None] * size
    dist.all_gather_object(told, dist.get_rank(turned), group=turned)
    said["turned"] = told
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(5, 3))
    model(torch.full((2, 5), rank + 1.0)).sum().backward()
    said["gradient"] = model.module.weight.grad.unique().tolist()
    return said


def shrink(seconds):
    began = time.monotonic()
    try:
        c10d_custom.shrink_group(timedelta(seconds=seconds))
        said = used()
    except RuntimeError as error:
        said = {"error": type(error).__name__, "text": str(error), "groups": dist.is_initialized()}
    return {**said, "seconds": time.monotonic() - began}


def outcome(make):
    """What comes of it: the error, if any, and the seconds."""
    began = time.monotonic()
    try:
        make()
        said = {"error": None}
    except RuntimeError as error:
        said = {"error": type(error).__name__, "text": str(error)}
    return {**said, "seconds": time.monotonic() - began}


def group(seconds):
    return outcome(lambda: dist.new_group(timeout=timedelta(seconds=seconds)))


def split(seconds):
    ranks = list(range(dist.get_world_size()))
    return outcome(lambda: dist.group.WORLD.split_group(ranks, timedelta(seconds=seconds)))


def destroy():
    return outcome(dist.destroy_process_group)


def reduce_until_it_fails():
    try:
        while True:
            dist.all_reduce(torch.ones(50_000))
    except RuntimeError as error:
        return {"lost": type(error).__name__}


def lose(folder, lost):
    rank = dist.get_rank()
    if rank in lost:
        dist.all_reduce(torch.ones(50_000))
        os.kill(os.getpid(), signal.SIGKILL)
    said = reduce_until_it_fails()
    for _ in range(3):  # launchers may end more ranks
        if "error" not in (came_of_it := shrink(30)):
            break
    said |= came_of_it
    (part := folder / f"{rank}.part").write_text(json.dumps(said))
    part.rename(folder / f"{rank}.json")


def main():
    seconds = float(os.environ.get("GROUP_SECONDS", 60))
    how = {}
    if "MASTER_PORT" in os.environ and "RANK" in os.environ:
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        how = {"init_method": address, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("custom", timeout=timedelta(seconds=seconds), **how)
    dist.all_reduce(torch.ones(3))
    if len(sys.argv) > 1:
        lose(Path(sys.argv[1]), set(map(int, sys.argv[2].split(","))))
        return dist.destroy_process_group()
    say(up=dist.get_rank(), pid=os.getpid())
    for line in sys.stdin:
        what, *rest = line.split()
        if what == "end":
            break
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        todo = {
            "reduce": reduce_until_it_fails,
            "shrink": shrink,
            "use": used,
            "group": group,
            "split": split,
            "destroy": destroy,
        }
        say(**todo[what](*map(float, rest)))
    if dist.is_initialized():
        dist.destroy_process_group()
    say(ended=True)


if __name__ == "__main__":
    main()
