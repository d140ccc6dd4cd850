"""What a kernel or a copy takes that each rank begins at the same time: some wait for their turn on the GPU, others do
not (c10d_custom/transport/cuda/algorithm.py). Then all_reduce of NCCL, where it can, whose kernels wait for each
other."""

import functools
import statistics
import time

import torch
import torch.distributed as dist

from c10d_custom.transport.cuda.driver import driver_of

from ..device import device_of
from .session import OutOfTime, Session

SIZES = (8, 1 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
CALLS = 60
WAYS = ("kernel", "on the GPU", "to the host", "to the GPU", "to the GPU, by rows")


@functools.lru_cache(maxsize=1)
def tensors(kind, nbytes):
    """(pinned host memory, two tensors on the device)"""
    host = torch.ones(nbytes, dtype=torch.uint8)
    return host.pin_memory() if kind == "cuda" else host, *(device_of(kind).put(host) for _ in range(2))


def call_of(kind, way, nbytes):
    """What does it and waits for it: as `Driver.copy_in` the last."""
    device, (host, one, other) = device_of(kind), tensors(kind, nbytes)
    if way == "to the GPU, by rows":
        if not device.queues:
            return lambda: one.copy_(host)
        driver, stream = driver_of(torch.device(device.name)), device.current().cuda_stream
        begin = functools.partial(driver.copy_in, stream, one.data_ptr(), host.data_ptr(), nbytes)
    else:
        begin = {
            "kernel": lambda: one.add_(other),
            "on the GPU": lambda: one.copy_(other),
            "to the host": lambda: host.copy_(one, non_blocking=True),
            "to the GPU": lambda: one.copy_(host, non_blocking=True),
        }[way]

    def call():
        begin()
        device.synchronize()

    return call


def take(kind, way, nbytes):
    """Microseconds, this rank's median."""
    call, times = call_of(kind, way, nbytes), []
    call()
    for _ in range(CALLS):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main():
    session = Session(__doc__)
    print("microseconds of each rank's call, begun by all at once: the quickest rank's to the slowest's")
    print(f"{'ranks':>5} {'bytes':>9}" + "".join(f"{way:>21}" for way in WAYS))
    for size in (1, 4, 2):
        if not session.wants(size):
            continue
        with session.pool(size) as pool:
            for nbytes in (s for s in SIZES if s <= session.largest):
                try:
                    found = {way: pool.run(take, session.device, way, nbytes) for way in WAYS}
                except OutOfTime:
                    session.left_out += 1
                    break
                told = "".join(f"{f'{min(f):.1f} to {max(f):.1f}':>21}" for f in found.values())
                print(f"{size:>5} {nbytes:>9}{told}", flush=True)
                for way, us in found.items():
                    figure = {"single_us": max(us), "row_us": max(us), "calls": CALLS}
                    session.add(operation="turns", variant=way, ranks=size, bytes=nbytes, backend="none", **figure)
    for size in (4, 2):
        if session.wants(size):
            session.nccl(size, SIZES[::3])
    session.finish()


if __name__ == "__main__":
    main()
