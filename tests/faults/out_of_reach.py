"""Every way a call can fail, and the end, where nothing can be loaded any more.

python tests/faults/out_of_reach.py files|package     (prints JSON: for each way, what each of two ranks got)

files: the table of descriptors is full. package: its folder is gone (a copy, of which this is run: PYTHONPATH).
"""

import json
import os
import resource
import sys
import time
from datetime import timedelta

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from forked import ForkedRanks, serve_store, store_at

import c10d_custom

SHORT, LONG = timedelta(seconds=0.5), timedelta(seconds=20)


def fill_the_table():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError:
        pass


def wait_for(there):
    until = time.monotonic() + 10
    while not there() and time.monotonic() < until:
        time.sleep(0.01)


def mismatch(rank, group):
    t = torch.ones(4)
    dist.all_reduce(t, group=group) if rank else dist.broadcast(t, 0, group=group)


def timeout(rank, group):
    if rank:
        time.sleep(1)
    dist.all_reduce(torch.ones(4), group=group)


def queued(rank, group):
    if rank:
        time.sleep(1)
    dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()


def message(rank, group):
    if not rank:
        dist.recv(torch.ones(4), 1, group=group)


def impatient(rank, group):
    if not rank:
        dist.irecv(torch.ones(4), 1, group=group).wait(timedelta(seconds=0.1))


def refused(rank, group):
    dist.all_gather_into_tensor(torch.ones(3), torch.ones(2), group=group)


def monitored(rank, group):
    if not rank:
        group.monitored_barrier(SHORT)


def aborted(rank, group):
    group.abort()
    dist.all_reduce(torch.ones(4), group=group)


def dead(rank, group):
    if rank:
        os._exit(0)
    dist.all_reduce(torch.ones(4), group=group)


WAYS = [mismatch, timeout, queued, message, impatient, refused, monitored, aborted, dead]


def run(rank, say, what, port):
    dist.init_process_group("custom", store=store_at(port, what), rank=rank, world_size=2, timeout=LONG)
    short = {timeout, queued, message}
    groups = {way: dist.new_group(timeout=SHORT if way in short else LONG) for way in WAYS}
    dist.all_reduce(torch.ones(1))
    if what == "files":
        fill_the_table()
    else:
        folder = os.path.dirname(c10d_custom.__file__)
        if rank == 0:
            os.rename(folder, f"{folder}-gone")
        wait_for(lambda: not os.path.exists(folder))
    for way in WAYS:
        try:
            way(rank, groups[way])
            error = None
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
        say(**{way.__name__: error})
    for group in list(groups.values()):
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    say(ended=True)


def main():
    what = sys.argv[1]
    torch.set_num_threads(1)
    c10d_custom.register()
    ranks = ForkedRanks(2, run, what, serve_store())
    stuck = ranks.finish(60)
    print(json.dumps({"stuck": stuck, "codes": ranks.codes, "said": ranks.said}))


if __name__ == "__main__":
    main()
