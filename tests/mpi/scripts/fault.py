"""Kinds of trouble, one after the other and each in a group of its own, over several hosts: every rank says what it was
told, in a file (launchers lose what is printed while they end a job).

    fault.py FOLDER KIND...
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from c10d_custom.transport.hosts import algorithm
from c10d_custom.transport.hosts.leader_all_reduce import LeaderAllReduce
from c10d_custom.transport.hosts.link import MpiLink
from c10d_custom.transport.hosts.pipelined_reduce import PipelinedReduce

GROUP_SECONDS = 4.0
MEDIUM = 4000  # float32: 16 KB, still a small all_reduce
HELD = 0.7  # s: that a rank is held up in a call while the others go on
HUGE = 1 << 24  # nearly all of the call's time, data move


def all_reduce(group, count, op=dist.ReduceOp.SUM, dtype=torch.float32):
    dist.all_reduce(torch.ones(count, dtype=dtype), op, group)


def forever(group, count):
    while True:
        all_reduce(group, count)


@contextmanager
def slower(owner, name, before=0.0, after=0.0, look=False):
    """A method that lets time pass; ``look``: and then looks at what the group knows, before it goes on."""
    method = getattr(owner, name)

    def slow(self, *args):
        time.sleep(before)
        if look:
            self.look(*args[:3])
        result = method(self, *args)
        time.sleep(after)
        return result

    setattr(owner, name, slow)
    yield
    setattr(owner, name, method)


def call_before(kind, group, rank, last):
    """A collective that is right, and in which the last rank still is when the others have gone on and disagree."""
    with ExitStack() as stack:
        if kind in ("ahead, leader", "ahead, inside"):
            # Who waits, for the other host or in its own, is held up there; the first makes it wait.
            if rank == (last - 1 if kind == "ahead, leader" else last):
                stack.enter_context(slower(LeaderAllReduce, "go_on", before=HELD))
            elif rank == 0:
                time.sleep(0.2)
            x = torch.full((4,), float(rank))
            dist.all_reduce(x, group=group)
            assert x.unique().tolist() == [sum(range(last + 1))]
        elif kind == "ahead, flat":
            if rank == last:
                stack.enter_context(slower(MpiLink, "wait", before=HELD, look=True))
            x = torch.full((4,), float(rank))
            dist.broadcast(x, 0, group)
            assert not x.any()
        elif kind == "ahead, pipelined":
            # One chunk: the last has given its part when it is held up, waiting for the part of the other host.
            if rank == last:
                stack.enter_context(slower(PipelinedReduce, "_look_around", before=HELD))
            elif rank < 2:
                stack.enter_context(slower(PipelinedReduce, "reduce", before=0.2))
            x = torch.full((1 << 15,), float(rank))
            dist.all_reduce(x, group=group)
            assert x.unique().tolist() == [sum(range(last + 1))]
        else:
            # The last but one hands the broadcast on late.
            if rank == last - 1:
                stack.enter_context(slower(MpiLink, "wait", after=0.1))
            x = torch.full((1 << 18,), float(rank))
            dist.broadcast(x, 0, group)
            assert not x.any()


def in_the_background(commands):
    # In a session of its own: what a launcher sends to this rank's process group would end it.
    subprocess.Popen(
        ["sh", "-c", commands],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def trouble(kind, group, rank, last):
    """What this rank does. It raises something, or returns."""
    if kind == "killed idle":
        if rank == last:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(group, 4)
    elif kind in ("killed small", "killed leader", "killed large"):
        if rank == (last - 1 if kind == "killed leader" else last):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        forever(group, {"killed small": 4, "killed large": 1 << 20}.get(kind, MEDIUM))
    elif kind == "killed first":
        if rank == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(group, 4)
    elif kind == "message":
        if rank == last:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            dist.recv(torch.ones(4), last, group)
        else:
            dist.recv(torch.ones(4), 0, group)
    elif kind == "count":
        all_reduce(group, 4 if rank else 5)
    elif kind == "small and large":
        all_reduce(group, 4 if rank % 2 else 1 << 20)
    elif kind == "small and medium":
        all_reduce(group, 4 if rank % 2 else MEDIUM)
    elif kind == "medium and large":
        all_reduce(group, 1 << 20 if rank == last else MEDIUM)
    elif kind == "medium":
        all_reduce(group, MEDIUM + (rank == last))
    elif kind == "dtype":
        all_reduce(group, 4, dtype=torch.float32 if rank != last else torch.int32)
    elif kind == "redop":
        all_reduce(group, 1 << 18, dist.ReduceOp.SUM if rank != last else dist.ReduceOp.MAX)
    elif kind == "operation":
        dist.barrier(group) if rank == last else all_reduce(group, 4)
    elif kind == "operation, medium":
        dist.barrier(group) if rank == last else all_reduce(group, MEDIUM)
    elif kind.startswith("ahead"):
        try:
            call_before(kind, group, rank, last)
        except Exception as error:
            raise AssertionError(f"the call before: {error}") from error
        all_reduce(group, 4 if rank else 5)
    elif kind == "refused":
        if rank == last:
            all_reduce(group, 4, dist.ReduceOp.BAND)
        else:
            all_reduce(group, 1 << 20)
    elif kind == "all refused":
        try:
            all_reduce(group, 4, dist.ReduceOp.BAND)
        except ValueError:
            all_reduce(group, 4)
            all_reduce(group, MEDIUM)
            all_reduce(group, 1 << 18)
            raise
    elif kind == "late":
        if rank == last:
            time.sleep(GROUP_SECONDS + 2)
        all_reduce(group, 4)
    elif kind == "late, large":
        if rank == last:
            time.sleep(GROUP_SECONDS + 2)
        all_reduce(group, 1 << 20)
    elif kind == "stopped":
        if rank == last:
            in_the_background(f"sleep {GROUP_SECONDS + 2}; kill -CONT {os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)
        all_reduce(group, 4)
    elif kind == "stopped amid":
        if rank == last:
            in_the_background(
                f"sleep 0.3; kill -STOP {os.getpid()}; sleep {GROUP_SECONDS + 2}; kill -CONT {os.getpid()}"
            )
        forever(group, HUGE)
    elif kind == "no message":
        if rank:
            time.sleep(GROUP_SECONDS + 1)
        else:
            dist.recv(torch.ones(4), last, group)
    elif kind == "size of a message":
        if rank == 0:
            dist.recv(torch.ones(4), last, group)
        if rank == last:
            dist.send(torch.ones(100000), 0, group) if last % 2 else dist.send(torch.ones(5), 0, group)
    elif kind == "left":
        if rank == last:
            dist.destroy_process_group(group)
        else:
            all_reduce(group, 1 << 18)
    elif kind == "aborted":
        if rank == last:
            time.sleep(0.5)
            group.abort()
        else:
            all_reduce(group, 1 << 18)
    elif kind == "aborted amid":
        if rank == last:
            threading.Timer(0.5, group.abort).start()
        forever(group, HUGE)
    elif kind == "interrupted":

        def handler(*_):
            raise InterruptedError("by a signal handler")

        if rank == last:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        if rank == 0:
            time.sleep(1)
        all_reduce(group, 4)
    elif kind.startswith("interrupted amid"):

        def handler(*_):
            raise InterruptedError("by a signal handler")

        # While the last is stopped, its carrier waits for it, and the others for their carrier.
        if rank == last:
            in_the_background(f"sleep 0.3; kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}")
        elif rank == (1 if kind.endswith("between") else 0):
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 1.0)
        forever(group, HUGE)
    elif kind == "cut":
        forever(group, 1 << 16)


def sent(group, to):
    """Sends something to that rank. The error, or that there was none."""
    try:
        dist.send(torch.ones(3), group=group, group_dst=to)
    except Exception as error:
        return str(error)
    return "no error"


def write(folder, name, said):
    # At one go: the launcher may end this process in the middle of anything.
    (part := folder / f"{name}.part").write_text(json.dumps(said))
    part.rename(part.with_suffix(".json"))


def main():
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("custom")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stacks = open(folder / f"{rank}.stacks", "w")  # of a rank that hangs; for said() in test_faults.py
    for number, kind in enumerate(kinds):
        faulthandler.dump_traceback_later(20, file=stacks)
        algorithm.MOST_RANKS = 2 if kind.endswith("many ranks") else 16
        group = dist.new_group(timeout=timedelta(seconds=GROUP_SECONDS))
        all_reduce(group, 4)
        dist.barrier(group)
        (folder / f"{kind}.{rank}.ready").touch()
        began = time.monotonic()
        said = {"rank": rank, "error": None}
        try:
            trouble(kind, group, rank, last)
        except Exception as error:
            said = {"rank": rank, "error": type(error).__name__, "text": str(error)}
        said["seconds"] = time.monotonic() - began
        if said["error"] == "CollectiveMismatchError" and "is of no more use" in said["text"]:
            said["sent"] = sent(group, (rank + 2) % (last + 1))
        write(folder, f"{kind}.{rank}", said)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if number < len(kinds) - 1:
            dist.barrier()
    dist.destroy_process_group()


main()
