"""The ranks of one host, one of which is killed while MPI starts, again and again.

    killed_while_starting.py ADDRESS SIZE FIRST COUNT
    killed_while_starting.py FOLDER TRIAL

ADDRESS: of rank 0's host; SIZE: of the job; FIRST, COUNT: this host's ranks. Each line of standard input, of JSON, is a
trial: ``port`` of rank 0's store; ``victim``: a rank; ``step``: as STEPS has it; ``delay``: s from there to its end.
The ranks are forks of one process that has imported torch. A rank's line: its ``rank``, ``at``: when it had its error
(time.monotonic, of all hosts of one machine), or died, and the ``error`` and its ``text``. The second form is one rank
of a launcher's job, and one trial: its line goes to FOLDER."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

# Each is called by every rank once, or more often, in this order.
STEPS = {
    "what there is": "creation.mpi_start:_found",
    "our own start": "launch.mpi_job:start",
    "MPI_Init": "launch.pmi:PmiServer.serve",
    "a question of libmpi's": "launch.pmi:PmiServer._answer",
    "addresses": "creation.mpi_start:_StoredKeyValues.meet",
    "MPI has started": "launch.mpi_job:_opened",
    "the communicator": "launch.communicators:create",
}
# Under a launcher of MPI's, where MPI has started before any rank has an address of another.
LAUNCHED = ["what there is", "the communicator"]
SECONDS = 40.0


def dies(step, delay):
    module, _, name = STEPS[step].partition(":")
    owner = import_module(f"c10d_custom.{module}")
    *above, name = name.split(".")
    for one in above:
        owner = getattr(owner, one)
    original = getattr(owner, name)

    def around(*arguments):
        setattr(owner, name, original)
        threading.Timer(delay, die).start() if delay else die()
        return original(*arguments)

    setattr(owner, name, around)


def say(**values):
    line = f"{json.dumps(values)}\n"
    if len(sys.argv) == 3:
        (part := Path(sys.argv[1], f"{values['rank']}.part")).write_text(line)
        part.rename(part.with_suffix(".json"))
    else:
        os.write(1, line.encode())


def die(rank=None):
    say(rank=int(os.environ["RANK_OF_TRIAL"]), at=time.monotonic(), error=None, text="")
    os.kill(os.getpid(), signal.SIGKILL)


def run(rank, trial, /, **how):
    os.environ["RANK_OF_TRIAL"] = str(rank)
    if rank == trial["victim"]:
        dies(trial["step"], trial["delay"])
    error = None
    try:
        dist.init_process_group("custom", timeout=timedelta(seconds=SECONDS), **how)
        while True:  # where the group was there before
            dist.all_reduce(torch.ones(3))
    except dist.DistError as raised:
        error = raised
    say(rank=rank, at=time.monotonic(), error=type(error).__name__, text=str(error))
    time.sleep(0.5)  # rank 0 serves the store


def launched(trial):
    run(int(os.environ["PMI_RANK"]), json.loads(trial))


def main():
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        return launched(sys.argv[2])
    address, size, first, count = sys.argv[1], *map(int, sys.argv[2:])
    say(ready=True)
    for line in sys.stdin:
        children = []
        for rank in range(first, first + count):
            if (pid := os.fork()) == 0:
                with contextlib.suppress(BaseException):
                    trial = json.loads(line)
                    run(rank, trial, init_method=f"tcp://{address}:{trial['port']}", rank=rank, world_size=size)
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
