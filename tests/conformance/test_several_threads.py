"""Programs whose ranks call from several threads at once: one group of all threads, and a group for each of them. Where
Python has no global interpreter lock, the threads are in our Python and in the C extension at the same time."""

import gc
import os
import subprocess
import sys
import sysconfig
import threading

import pytest
import torch
import torch.distributed as dist

from .cases import check

THREADS = 6
SIZES = (3, 1000, 40_000)  # elements: by slots, by slots in several steps, by rings


def _in_threads(work):
    """What each thread of work(number) raised, in words."""
    raised = []

    def caught(number, start):
        start.wait()
        try:
            work(number)
        except BaseException as error:
            raised.append(f"thread {number}: {type(error).__name__}: {error}")

    start = threading.Barrier(THREADS)
    threads = [threading.Thread(target=caught, args=(n, start), daemon=True) for n in range(THREADS)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # where there is a lock, let it change hands often
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    return raised + [f"thread {n} has not ended" for n, thread in enumerate(threads) if thread.is_alive()]


def _require(tensor, value, what):
    wrong = tensor[tensor != value]
    assert not len(wrong), f"{what}: {wrong[0].item()} instead of {value}, and {len(wrong) - 1} more"


def _of_one_group(rounds):
    """Of calls that are alike it does not matter which thread's meets which; messages find each other by their tags."""
    me, size = dist.get_rank(), dist.get_world_size()

    def work(number):
        for i in range(rounds):
            t = torch.full((1000,), float(me + 1))
            reducing = dist.all_reduce(t, async_op=i % 3 == 0)
            if reducing is not None:
                reducing.wait()
            _require(t, size * (size + 1) / 2, f"all_reduce {i}")
            sent, got = torch.full((50,), number * 1000 + i), torch.zeros(50, dtype=torch.long)
            sending = dist.isend(sent, (me + 1) % size, tag=number)
            dist.recv(got, (me - 1) % size, tag=number)
            sending.wait()
            _require(got, number * 1000 + i, f"message {i}")
            if i % 10 == 0:
                gc.collect(0)

    return _in_threads(work)


def _of_a_group_each(rounds):
    me, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(THREADS)]

    def work(number):
        group = groups[number]
        for i in range(rounds):
            t = torch.full((SIZES[i % 3],), float(me + number))
            dist.all_reduce(t, group=group)
            _require(t, size * number + size * (size - 1) / 2, f"all_reduce {i}")
            parts = [torch.zeros(100, dtype=torch.int16) for _ in range(size)]
            dist.all_gather(parts, torch.full((100,), me + number + i, dtype=torch.int16), group=group)
            for r, part in enumerate(parts):
                _require(part, r + number + i, f"all_gather {i}")
            t = torch.full((10,), me * 100 + number)
            dist.broadcast(t, i % size, group=group)
            _require(t, i % size * 100 + number, f"broadcast {i}")

    raised = _in_threads(work)
    for group in groups:
        dist.destroy_process_group(group)
    return raised


USED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("custom", init_method="file://" + sys.argv[1], rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.all_reduce(torch.ones(3), async_op=True).wait()
dist.isend(torch.ones(3), 0)
dist.recv(torch.ones(3), 0)
dist.destroy_process_group()
sys.exit("the lock is on" if sys._is_gil_enabled() else 0)
"""


def test_one_group(ranks, full):
    check(ranks, _of_one_group, 500 if full else 40)


def test_a_group_for_each_thread(ranks, full):
    check(ranks, _of_a_group_each, 500 if full else 30)


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has the lock")
def test_the_lock_stays_off(tmp_path):
    """When we have been imported and used. In a process that imports nothing else: triton turns the lock on."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    command = [sys.executable, "-P", "-c", USED, str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
