"""GPU memory: a destroyed group returns what it took, and ended processes return all, a killed one included."""

import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from harness import RankFailure, RankPool
from harness.shm import in_dev_shm

from .device import device_of

# One group's staging buffer is 64 MiB unless set; what a group that leaks would leave at the least.
STAGING = int(os.environ.get("C10D_CUSTOM_CUDA_STAGING_BYTES", 64 << 20))


def one_life(device):
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (4, 3_000_000):
        dist.all_reduce(device.put(torch.ones(count)), group=group)
        dist.all_reduce(device.put(torch.ones(count)), group=group, async_op=True).get_future().wait()
        request = dist.isend(device.put(torch.ones(count)), group=group, group_dst=(rank + 1) % size)
        dist.recv(device.put(torch.ones(count)), group=group, group_src=(rank - 1) % size)
        request.wait()
    device.synchronize()
    dist.destroy_process_group(group)


def held(device):
    """Free memory of the GPU, all ranks being at rest, and this process's descriptors."""
    dist.barrier()
    free = device.free_bytes()
    dist.barrier()
    return free, len(os.listdir("/proc/self/fd"))


def many_lives(kind, times):
    device = device_of(kind)
    for _ in range(3):  # what the first groups make the process hold for good: contexts, modules, cached blocks
        one_life(device)
    free, descriptors = held(device)
    for _ in range(times):
        one_life(device)
    free_after, descriptors_after = held(device)
    wrong = []
    if free - free_after >= STAGING:
        wrong.append(f"{times} groups left {(free - free_after) / 2**20:.0f} MiB of GPU memory")
    if descriptors_after > descriptors + 1:  # one more may be open for a moment
        wrong.append(f"{times} groups left {descriptors_after - descriptors} descriptors")
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_groups_return_their_memory(ranks, device):
    assert not any(found := ranks.run(many_lives, device, 12)), found


def used_mib():
    """Memory in use on each GPU, as the driver has it."""
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        text=True,
        capture_output=True,
        timeout=30,
        check=True,
    ).stdout
    return [int(line) for line in out.split()]


def killed(kind, victim):
    device, rank = device_of(kind), dist.get_rank()
    one_life(device)
    data = device.put(torch.ones(4_000_000))
    dist.all_reduce(data)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100_000):
        dist.all_reduce(data)


@pytest.mark.parametrize("victim", [None, 1], ids=["in good order", "one killed"])
def test_ended_processes_leave_nothing(device, backend, victim):
    """Other processes' use of the GPU may hide a leak of theirs, never of ours: only growth is looked at."""
    if device == "cuda" and not shutil.which("nvidia-smi"):
        pytest.skip("nvidia-smi is not there")
    before, shm = used_mib() if device == "cuda" else [0], in_dev_shm()
    pool = RankPool(2, backend)
    if victim is None:
        pool.run(many_lives, device, 1)
        assert pool.close() is None
    else:
        with pytest.raises(RankFailure, match="rank 1 .*has died|died, exit code -9"):
            pool.run(killed, device, victim, timeout=40)
    deadline = time.monotonic() + 10
    while (
        device == "cuda"
        and max(now - then for now, then in zip(used_mib(), before)) > 0
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    after = used_mib() if device == "cuda" else [0]
    assert all(now <= then for now, then in zip(after, before)), (before, after)
    assert not in_dev_shm() - shm
