"""A rank's tensors on its simulated GPU, and the options of calls on them."""

from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import AllreduceOptions


def options(asynchronous, seconds=None):
    o = AllreduceOptions()
    o.asyncOp = asynchronous
    if seconds:
        o.timeout = timedelta(seconds=seconds)
    return o


def device_tensor(r, count, value, dtype=torch.float32):
    t = torch.zeros(count, dtype=dtype)
    r.fill(t, torch.full((count,), value, dtype=dtype))
    return t


def contents(r, tensor):
    got = []
    r.read(tensor, got)
    r.synchronize()
    return got[0]


def warm(r):
    """The group has chosen its mode, and no rank is still at it, whom what another does next could disturb."""
    r.pg.allreduce([device_tensor(r, 1, 0.0)], options(False))
    r.synchronize()
    r.world.barrier(r.size)
