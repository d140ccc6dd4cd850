"""A rank of the self-test."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from datetime import timedelta

from .self_test import GROUP, RANKS

_PR_SET_PDEATHSIG = 1
_MANY = 1 << 18  # floats: more than goes with the announcement of a call


def main(store: str, rank_text: str) -> None:
    """Exits with status 0 if the group did what it must. Says last how many seconds it took, or what it did not do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not to outlive who started it
    status = 1
    try:
        print(_use(store, int(rank_text)), flush=True)
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
    os._exit(status)


def _use(store: str, rank: int) -> float:
    import torch
    import torch.distributed as dist

    began = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group(
        "custom", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=GROUP)
    )
    for count in (8, _MANY):
        values = torch.arange(float(count)) * (rank + 1)
        dist.all_reduce(values)
        _expect(values, torch.arange(float(count)) * 3, f"all_reduce of {count} floats")
    mine, theirs = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    if rank == 0:
        dist.send(mine, 1)
        dist.recv(theirs, 1)
        _expect(theirs, mine + 1, "send and recv")
    else:
        dist.recv(theirs, 0)
        dist.send(theirs + 1, 0)
    dist.destroy_process_group()
    return round(time.monotonic() - began, 3)


def _expect(got: object, wanted: object, what: str) -> None:
    import torch

    assert isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor)
    if not torch.equal(got, wanted):
        raise ValueError(f"{what} gave other values than it must")
