"""Ordinary events: a result that is copied back to a Parameter, a look at one's own memory, a fork, a standard
library that somebody has patched."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from c10d_custom.errors import CustomBackendError
from ecosystem.spawn import run

LARGE = 4_000_000  # floats: no message of this size fits into what a rank may send ahead
SECONDS = timedelta(seconds=15)


def _error(call):
    try:
        call()
    except CustomBackendError as error:
        return str(error)
    return None


def parameter(rank, size):
    """A leaf that requires grad and is not contiguous: its result is copied to it by another thread, with its own grad
    mode."""
    p = torch.nn.Parameter(torch.zeros(4, 3).t())
    for _ in range(60):
        with torch.no_grad():
            p.fill_(rank + 1.0)
            dist.all_reduce(p, async_op=True).wait()
        assert p.unique().tolist() == [float(sum(range(1, size + 1)))] and p.requires_grad


def test_a_parameter_that_is_not_contiguous():
    run(parameter, 2)


def inference(rank, size):
    """A tensor of inference mode, which the other thread is not in."""
    with torch.inference_mode():
        t = torch.zeros(4, 3).t()
    for _ in range(60):
        with torch.inference_mode():
            t.fill_(rank + 1.0)
            work = dist.all_reduce(t, async_op=True)
        work.wait()
        assert t.unique().tolist() == [float(sum(range(1, size + 1)))]


def test_a_tensor_of_inference_mode_that_is_not_contiguous():
    run(inference, 2)


def own_memory_opened(rank, size):
    """Any close of a descriptor of a file drops a process's POSIX locks on it: a rank whose memory was looked at is not
    dead."""
    group = dist.new_group(timeout=SECONDS)
    dist.barrier(group)
    opened = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:c10d_custom" in os.readlink(f"/proc/self/fd/{fd}"):
                os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
                opened += 1
        except FileNotFoundError:
            continue
    assert opened
    for _ in range(3):
        if rank == 0:
            time.sleep(0.1)  # the others look whether it lives
        dist.barrier(group)
        t = torch.ones(LARGE)
        dist.all_reduce(t, group=group)
        assert t[0] == size
    dist.destroy_process_group(group)


def test_a_rank_that_lost_its_lock_lives():
    run(own_memory_opened, 3)


def forked(rank, size):
    pid = os.fork()
    if pid == 0:
        said = [
            _error(call) or ""
            for call in (
                lambda: dist.all_reduce(torch.ones(1)),
                lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
                lambda: dist.send(torch.ones(1), 1 - rank),
                lambda: dist.recv(torch.ones(1), 1 - rank),
                lambda: dist.barrier(),
            )
        ]
        os._exit(0 if all("forked child" in text for text in said) else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    dist.barrier()
    return status


def test_a_forked_child_is_told_what_it_is():
    assert run(forked, 2) == [0, 0]


def test_a_standard_library_patched_as_gevent_does():
    script = Path(__file__).with_name("patched.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["stuck"] and result["codes"] == [0, 0], result
    for rank, said in enumerate(result["said"]):
        assert (said["sum"], said["called"], said["received"]) == ([2.0] * 4, [[4.0] * 4], [1.0 - rank] * 4), result
    assert "CollectiveTimeoutError" in result["said"][0]["error"], result
