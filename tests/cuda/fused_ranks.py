"""Ranks with a simulated GPU each, in p2p mode: what the fused kernels do."""

import time

import pytest
import torch
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions, ReduceScatterOptions

from c10d_custom.errors import AbortedError, CustomBackendError, PeerLostError
from device_tensors import contents, device_tensor, options
from thread_ranks import run_ranks

P2P = {"cuda_mode": "p2p"}


def gpus(size):
    return [f"GPU-{r}" for r in range(size)]


def run(size, body, config=P2P, **more):
    return run_ranks(size, body, config={**P2P, **config}, gpus=gpus(size), **more)


# (tensors, options) -> Work
OPS = {
    "all_reduce": lambda r, given, taken, o: r.pg.allreduce([given], o),
    "all_gather": lambda r, given, taken, o: r.pg._allgather_base(taken, given, o),
    "reduce_scatter": lambda r, given, taken, o: r.pg._reduce_scatter_base(taken, given, o),
    "broadcast": lambda r, given, taken, o: r.pg.broadcast([given], o),
}
_OPTIONS = {"all_gather": AllgatherOptions, "reduce_scatter": ReduceScatterOptions, "broadcast": BroadcastOptions}


class Asked:
    """A collective of these ranks, of which rank r gives 1 + r ``count`` times (to each)."""

    def __init__(self, r, op, count):
        n = r.size
        self.r, self.op = r, op
        self.given = device_tensor(r, count * (n if op == "reduce_scatter" else 1), 1.0 + r.rank)
        total = n * (n + 1) / 2
        self.taken, self.wanted = self.given, {"all_reduce": total, "broadcast": 1.0}.get(op)
        if op == "all_gather":
            self.taken, self.wanted = device_tensor(r, count * n, 0.0), None
        elif op == "reduce_scatter":
            self.taken, self.wanted = device_tensor(r, count, 0.0), total

    def call(self, asynchronous=False, seconds=None):
        o = options(asynchronous, seconds) if self.op == "all_reduce" else _OPTIONS[self.op]()
        o.asyncOp = asynchronous
        return OPS[self.op](self.r, self.given, self.taken, o)

    def is_right(self):
        got = contents(self.r, self.taken)
        n = self.r.size
        want = torch.arange(1.0, n + 1).repeat_interleave(len(got) // n) if self.wanted is None else self.wanted
        return bool((got == want).all())


def transport_of(r):
    return next(iter(r.pg._transport._cuda.values()))


def is_void(r, work, kinds=(PeerLostError, AbortedError), match="void"):
    r.synchronize(5.0)  # nothing waits for ever
    with pytest.raises(kinds, match=match):
        work.is_completed()
    with pytest.raises(kinds, match=match):
        work.wait()
    until = time.monotonic() + 5
    while not r.cpu.broken() and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(CustomBackendError):
        r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False, 5.0))
