"""Ranks with a simulated GPU each, in p2p mode: whose all_reduce the fused kernels do."""

import time

import pytest

from c10d_custom.errors import CustomBackendError, PeerLostError
from device_tensors import device_tensor, options
from thread_ranks import run_ranks

P2P = {"cuda_mode": "p2p"}


def gpus(size):
    return [f"GPU-{r}" for r in range(size)]


def run(size, body, config=P2P, **more):
    return run_ranks(size, body, config={**P2P, **config}, gpus=gpus(size), **more)


def transport_of(r):
    return next(iter(r.pg._transport._cuda.values()))


def is_void(r, work, kinds=PeerLostError, match="void"):
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
