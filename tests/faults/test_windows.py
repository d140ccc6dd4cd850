"""Windows (docs/windows.md) where ranks die, are interrupted, fork or end their group, and what is left of them."""

import gc
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import c10d_custom
from c10d_custom.errors import AbortedError, CustomBackendError, PeerLostError
from harness import Layout, RankFailure, RankPool
from harness.groups import group_with_timeout
from harness.shm import in_dev_shm

from .test_interrupted import Alarm, alarm, handler_after


def dying_case(how):
    """Rank 1 dies. Rank 0 waits for it, and rank 2 finds it gone later."""
    rank, group = dist.get_rank(), dist.new_group()
    window = group.new_window(torch.zeros(30_000))
    if rank == 1:
        window.put(torch.ones(30_000), 0, 0)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(60)
    began = time.monotonic()
    if rank == 2:
        time.sleep(1)
    try:
        work = window.wait_signal(1, how == "asynchronous")
        work.wait()
    except PeerLostError as error:
        said = str(error)
    raise RuntimeError(f"SURVIVOR {rank} after {time.monotonic() - began:.2f} s: {said}")


@pytest.mark.skipif(Layout.chosen() is not None, reason="a launcher ends the ranks that are to tell")
@pytest.mark.parametrize("how", ["synchronous", "asynchronous"])
def test_a_peer_that_dies_while_waited_for_is_named(backend, how):
    before = in_dev_shm()
    pool = RankPool(3, backend)
    with pytest.raises(RankFailure) as failure:
        pool.run(dying_case, how)
    text = str(failure.value)
    assert "SURVIVOR 0" in text and "SURVIVOR 2" in text, text
    assert text.count("wait_signal of group") >= 2 and text.count("rank 1") >= 2, text
    assert not in_dev_shm() - before


def interrupted_case():
    """A handler that raises leaves a wait, which has used no signal up."""
    rank, wrong = dist.get_rank(), []
    group = group_with_timeout(timedelta(seconds=30))
    memory = torch.zeros(1)
    window = group.new_window(memory)
    if rank == 0:
        pending = window.wait_signal(1, True)
        for wait in (lambda: window.wait_signal(1), pending.wait):
            try:
                with handler_after(0.3, alarm):
                    wait()
                wrong.append("nothing was raised")
            except Alarm:
                pass
    dist.barrier()
    window.put(torch.tensor([float(rank + 1)]), 1 - rank, 0)
    window.signal(1 - rank)
    window.wait_signal(1 - rank)
    wrong += [] if memory == 2 - rank else [f"{memory}"]
    window.tensor_deregister()
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.world_sizes(2)
def test_an_interrupted_wait(ranks):
    assert not any(found := ranks.run(interrupted_case)), found


def ended_case():
    """The group ends while a thread waits; later calls say so, and the tensors stay."""
    rank, wrong = dist.get_rank(), []
    group = dist.new_group()
    memory = torch.full((20_000,), float(rank))
    window, errors = group.new_window(memory), []

    def wait():
        try:
            window.wait_signal(1 - rank)
        except CustomBackendError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    dist.destroy_process_group(group)
    thread.join(20)
    # The peer may have left first.
    wrong += [] if len(errors) == 1 and isinstance(errors[0], (AbortedError, PeerLostError)) else [f"{errors}"]
    for call in (lambda: window.put(memory, 1 - rank, 0), lambda: window.signal(1 - rank), window.tensor_deregister):
        try:
            call()
            wrong.append("nothing was raised")
        except AbortedError:
            pass
    wrong += [] if memory.eq(rank).all() else ["the tensor is lost"]
    return wrong


@pytest.mark.world_sizes(2)
def test_a_group_that_ends(ranks):
    assert not any(found := ranks.run(ended_case)), found


def forked_case():
    rank, wrong = dist.get_rank(), []
    memory = torch.zeros(100)
    window = dist.group.WORLD.new_window(memory)
    pid = os.fork()
    if pid == 0:
        try:
            window.signal(1 - rank)
            os._exit(1)
        except CustomBackendError:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    wrong += [f"child: {status}"] if status else []
    window.tensor_deregister()
    return wrong


@pytest.mark.world_sizes(2)
def test_a_forked_child(ranks):
    assert not any(found := ranks.run(forked_case)), found


def belongings():
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:c10d_custom" in line for line in maps)
    return mapped, len(os.listdir("/proc/self/fd"))


def leftovers_case():
    """Windows, deregistered or not, go with their group, and mapped memory with its tensor."""
    rank, before = dist.get_rank(), []
    for life in range(5):
        group = dist.new_group()
        windows = [group.new_window(c10d_custom.empty(20_000, group=group)) for _ in range(2)]
        theirs = windows[0].map_remote_tensor(1 - rank) if group.cpu_transport.has_arena() else None
        windows[0].signal(1 - rank)
        windows[0].wait_signal(1 - rank)
        windows[0].tensor_deregister()
        dist.destroy_process_group(group)
        del group, windows, theirs
        dist.barrier()
        if life == 1:
            before = belongings()
    return [] if before == belongings() else [f"{before} {belongings()}"]


@pytest.mark.world_sizes(2)
def test_they_leave_nothing(ranks):
    assert not any(found := ranks.run(leftovers_case)), found
