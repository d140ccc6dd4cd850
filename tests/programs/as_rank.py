"""Runs a program that starts its own ranks as one rank of an MPI job: as_rank.py PROGRAM [ARGUMENT...]

Processes that one process starts cannot be on two hosts. So the launcher starts the program on every rank, and
what the program would start here is replaced: of the processes that it makes, in order, each rank runs the one
of its own number, by calling its function. init_process_group loses the rank, size and address that the program
gives it, which hold for one host: with "custom" they come from the launcher. Other backends get them by env://; so do
all under torchrun, which sets what that reads.
"""

import contextlib
import os
import runpy
import sys

import torch.distributed as dist
import torch.multiprocessing as mp

# As under torchrun, programs may read LOCAL_RANK before they call init_process_group.
RANK, SIZE, LOCAL = next(
    (int(os.environ[rank]), int(os.environ[size]), os.environ[local])
    for rank, size, local in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    )
    if rank in os.environ
)

os.environ.setdefault("LOCAL_RANK", LOCAL)
_torchruns = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if "TORCHELASTIC_RUN_ID" in os.environ}
_real_init = dist.init_process_group
_output = sys.stdout


def init_process_group(backend, init_method=None, rank=-1, world_size=-1, **options):
    sys.stdout = _output  # from here on it is a rank, whoever called it
    assert rank in (-1, RANK) and world_size in (-1, SIZE), f"{rank} of {world_size} in a job's {RANK} of {SIZE}"
    given = {name: os.environ.pop(name, None) for name in ("MASTER_ADDR", "MASTER_PORT")}
    if _torchruns:
        os.environ.update(_torchruns)
    elif backend != "custom":
        os.environ.update(
            RANK=str(RANK),
            WORLD_SIZE=str(SIZE),
            LOCAL_RANK=LOCAL,
            MASTER_ADDR=os.environ["C10D_TEST_FIRST_HOST"],
            MASTER_PORT=given["MASTER_PORT"] or "29500",
        )
    _real_init(backend, **options)
    os.environ.update({name: value for name, value in given.items() if value is not None})


class Process:
    number = 0

    def __init__(self, target, args):
        self.target, self.args = target, args

    def start(self):
        if Process.number == RANK:
            self.target(*self.args)
        Process.number += 1

    def join(self):
        assert Process.number == SIZE, f"the program has {Process.number} ranks, the job {SIZE}"


def spawn(function, args=(), nprocs=1, join=True):
    assert nprocs == SIZE, f"the program has {nprocs} ranks, the job {SIZE}"
    function(RANK, *args)


dist.init_process_group, mp.Process, mp.spawn = init_process_group, Process, spawn
del sys.argv[0]
# What the program does before it has ranks it would do once: only rank 0 is heard.
with contextlib.redirect_stdout(_output if RANK == 0 else open(os.devnull, "w")):
    runpy.run_path(sys.argv[0], run_name="__main__")
