"""The ranks of one host, each of which says what it took to make its first group.

    start_up.py ADDRESS PORT SIZE FIRST COUNT

ADDRESS, PORT: of rank 0's store; SIZE: of the job; FIRST, COUNT: this host's ranks. They are forks of one process that
has imported torch, since importing it takes longer than all that is counted here; it writes "ready" then, and forks
when it has read a line.

A rank's line of JSON, by whose it is ("mpi": what libmpi asks a launcher for, answered over the store; "group": all
else): ``operations`` on the store, by kind, without ``looks``, which are more the longer a rank waits; ``bytes`` that
the store has handed to it; ``seconds`` until it had its group, and of those MPI's; ``asked``: of what libmpi asked for,
how often."""

import atexit
import json
import os
import sys
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from c10d_custom.creation import bounded_store
from c10d_custom.launch import mpi_job, pmi

ABSENT = b"(absent)"


class Observed:
    """What this process does from now on."""

    def __init__(self):
        self.operations, self.bytes = {"group": Counter(), "mpi": Counter()}, Counter()
        self.looks, self.asked, self.mpi_seconds = 0, Counter(), 0.0
        self._wrap(bounded_store.BoundedStore, "_ask", self._ask)
        self._wrap(pmi.PmiServer, "_to", self._to)
        self._wrap(mpi_job, "start", self._start)

    @staticmethod
    def _wrap(owner, name, around):
        original = getattr(owner, name)
        setattr(owner, name, lambda *arguments: around(original, *arguments))

    def _ask(self, original, store, call, *arguments):
        value = original(store, call, *arguments)
        key = arguments[0] if isinstance(arguments[0], str) else arguments[0][0]
        whose = "mpi" if key.startswith(("pmi/", "mpi started/")) else "group"
        # Those that wait for long also say, and look, whether all were given the same members.
        if call.__name__ == "compare_set" or key.startswith("members/"):
            self.looks += 1
        else:
            self.operations[whose][call.__name__] += 1
        if isinstance(value, bytes) and value != ABSENT:
            self.bytes[whose] += len(value)
        return value

    def _to(self, original, server, line, *more):
        self.asked[line.get("cmd", line.get("mcmd"))] += 1
        return original(server, line, *more)

    def _start(self, original, *arguments):
        began = time.monotonic()
        job = original(*arguments)
        self.mpi_seconds = time.monotonic() - began
        return job


def run(rank, address, port, size):
    observed = Observed()
    began = time.monotonic()
    dist.init_process_group(
        "custom", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=150)
    )
    seconds = time.monotonic() - began
    x = torch.tensor([rank])
    dist.all_reduce(x)
    line = {"rank": rank, "sum": int(x), "seconds": seconds, **vars(observed)}
    os.write(1, f"{json.dumps(line)}\n".encode())
    dist.destroy_process_group()


def main():
    address, port, size, first, count = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    os.write(1, b"ready\n")
    sys.stdin.readline()
    children = []
    for rank in range(first, first + count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(rank, address, port, size)
                atexit._run_exitfuncs()
                status = 0
            finally:
                os._exit(status)  # taking the interpreter down would copy most of the parent's memory
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


if __name__ == "__main__":
    main()
