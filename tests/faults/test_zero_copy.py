"""Tensors of c10d_custom.empty where ranks die, come late or fork; how long they live, and what is left of them."""

import copy
import gc
import os
import pickle
import resource
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import c10d_custom
from c10d_custom.errors import AbortedError, CollectiveTimeoutError, CustomBackendError, PeerLostError, TransportError
from harness import RankFailure, RankPool
from harness.groups import group_with_timeout

MB = 1 << 20


def arenas():
    """Bytes of memory that this process's segments have, whoever uses them."""
    return sum(
        os.fstat(int(fd)).st_blocks * 512
        for fd in {
            os.stat(f"/proc/self/fd/{fd}").st_ino: fd
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}") and "memfd:c10d_custom" in os.readlink(f"/proc/self/fd/{fd}")
        }.values()
    )


def dying_case():
    rank, group = dist.get_rank(), dist.new_group()
    t = c10d_custom.empty(16 * MB, group=group).fill_(0)
    dist.all_reduce(t, group=group)
    if rank == 1:
        # Amid a call, most likely: they take all of the time.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            dist.all_reduce(t, group=group)
    except PeerLostError as error:
        said = str(error)
    # It is this rank's own, and nobody else's.
    t.fill_(3)
    dist.destroy_process_group(group)
    assert t.eq(3).all()
    u = c10d_custom.empty(10_000) if rank == 0 else None  # of a group that is whole
    raise RuntimeError(f"SURVIVOR {rank}: {said} {u is not None}")


def test_a_rank_that_dies_amid_a_call_is_named(backend):
    pool = RankPool(3, backend)
    with pytest.raises(RankFailure) as failure:
        pool.run(dying_case)
    text = str(failure.value)
    assert "SURVIVOR 0" in text and "SURVIVOR 2" in text and text.count("rank 1 (pid") >= 2, text


def late_case():
    """What a rank does with its tensor after a call that failed is its own affair, though others still come to it."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    group = group_with_timeout(timedelta(seconds=1))
    t = c10d_custom.empty(MB, group=group).fill_(rank + 1)
    dist.barrier()
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError):
            dist.all_reduce(t, group=group)
        t.fill_(7)
        store.set("late", "now")
    else:
        store.wait(["late"])
        with pytest.raises(CustomBackendError):
            dist.all_reduce(t, group=group)
        t.fill_(8)
    dist.barrier()
    wrong = [] if t.eq(8 if rank else 7).all() else [f"{t}"]
    dist.destroy_process_group(group)
    del t
    return wrong


@pytest.mark.world_sizes(2)
def test_after_a_failure_a_tensor_is_its_ranks_own(ranks):
    assert not any(found := ranks.run(late_case)), found


def stopped_case():
    """What a rank has of its tensor after a call that failed is what it keeps, though a peer was stopped amid it."""
    rank, wrong = dist.get_rank(), []
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    for _ in range(2):
        group = group_with_timeout(timedelta(seconds=1))
        t = c10d_custom.empty(16 * MB, group=group)
        dist.barrier()
        stop = threading.Timer(0.2, os.kill, (pids[1], signal.SIGSTOP))
        try:
            if rank == 0:
                stop.start()
            with pytest.raises(CustomBackendError):
                while True:
                    t[::1024] = rank + 1  # in each page, and in no time
                    dist.all_reduce(t, group=group)
            seen = t.clone()
        finally:
            if rank == 0:
                stop.join()
                os.kill(pids[1], signal.SIGCONT)
        time.sleep(0.3)
        wrong += [] if torch.equal(t, seen) else [f"{int((t != seen).sum())} elements changed"]
        t.fill_(5)
        dist.barrier()
        wrong += [] if t.eq(5).all() else ["it is not its rank's own"]
        dist.destroy_process_group(group)
    return wrong


@pytest.mark.world_sizes(2)
def test_a_stopped_peer_changes_nothing_later(ranks):
    if ranks.layout:
        pytest.skip("over hosts they are ordinary tensors")
    assert not any(found := ranks.run(stopped_case)), found


def interrupted_case():
    """A signal handler raises amid a call; the peer fails, and the tensor is the caller's."""
    rank, group = dist.get_rank(), dist.new_group()
    t = c10d_custom.empty(MB, group=group).fill_(1)
    if rank == 0:

        class Interruption(Exception):
            pass

        def handler(*_):
            raise Interruption

        before = signal.signal(signal.SIGUSR1, handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Interruption):
            dist.all_reduce(t, group=group)
        signal.signal(signal.SIGUSR1, before)
    else:
        time.sleep(1)
        with pytest.raises(CustomBackendError):
            dist.all_reduce(t, group=group)
    t.fill_(rank)
    dist.barrier()
    wrong = [] if t.eq(rank).all() else [f"{t}"]
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.world_sizes(2)
def test_an_interrupted_call_lets_go(ranks):
    assert not any(found := ranks.run(interrupted_case)), found


OTHER = 16 * MB  # what the calls themselves use comes and goes, too


def memory_case():
    """Memory that a tensor has left goes back once no other has needed it for a second."""
    rank, wrong = dist.get_rank(), []
    group = dist.new_group()
    dist.all_reduce(torch.ones(MB), group=group)
    before = arenas()
    dist.barrier()
    for _ in range(3):
        t = c10d_custom.empty(256 * MB, dtype=torch.uint8, group=group)
        part = t[5:]
        del t
        dist.barrier()
        if arenas() < before + 2 * 256 * MB - OTHER:
            wrong.append("it has no memory, or gave it back too soon")
        dist.barrier()
        del part
        gc.collect()
        dist.barrier()
        for _ in range(6):
            time.sleep(0.6)
            dist.all_reduce(torch.ones(MB), group=group)
        dist.barrier()
        if (left := arenas() - before) > OTHER:
            wrong.append(f"{left >> 20} MB are left")
        dist.barrier()
        before = arenas()
        dist.barrier()
    kept = c10d_custom.empty(MB, group=group).fill_(rank)
    dist.destroy_process_group(group)
    with pytest.raises(AbortedError):
        c10d_custom.empty(10_000, group=group)
    wrong += [] if kept.eq(rank).all() else ["lost with the group"]
    kept += 1
    wrong += [] if kept.eq(rank + 1).all() else ["of no use after the group"]
    del kept, group
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[4] for line in maps if "memfd:c10d_custom" in line}
    descriptors = [
        fd
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}") and "memfd:c10d_custom" in os.readlink(f"/proc/self/fd/{fd}")
    ]
    # The default group's own.
    if len(mapped) > 1 or len(descriptors) > 1:
        wrong.append(f"mapped: {mapped}, descriptors: {descriptors}")
    return wrong


def test_memory_goes_back(backend):
    pool = RankPool(2, backend)
    try:
        assert not any(found := pool.run(memory_case)), found
    finally:
        pool.close()


def no_memory_case():
    try:
        c10d_custom.empty(1 << 50, dtype=torch.uint8)
    except TransportError as error:
        return [] if "KiB" in str(error) else [str(error)]
    return ["nothing was raised"]


def no_addresses_case():
    rank, wrong = dist.get_rank(), []
    group = dist.new_group()
    with open("/proc/self/statm") as f:
        most = int(f.read().split()[0]) * resource.getpagesize() + 64 * MB
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        t = c10d_custom.empty(MB, group=group).fill_(rank + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    for each in t, c10d_custom.empty(MB, group=group).fill_(rank + 1):
        dist.all_reduce(each, group=group)
        wrong += [] if each.eq(3).all() else ["all_reduce"]
    cpu = torch.device("cpu")
    wrong += [] if group._get_backend(cpu).supports_tensor_alloc(cpu) == (rank == 1) else ["supports_tensor_alloc"]
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.world_sizes(2)
def test_where_addresses_are_short_they_are_ordinary_tensors(ranks):
    assert not any(found := ranks.run(no_addresses_case)), found


@pytest.mark.world_sizes(2)
def test_more_than_there_is(ranks):
    if ranks.layout:
        pytest.skip("over hosts they are ordinary tensors")
    assert not any(found := ranks.run(no_memory_case)), found


def forked_case():
    """A child has what the parent had, and neither writes to the other's."""
    rank, wrong = dist.get_rank(), []
    t = c10d_custom.empty(10_000).fill_(rank + 1)  # of more, torch would use threads, which a fork has not
    pid = os.fork()
    if pid == 0:
        ok = bool(t.eq(rank + 1).all())
        t.fill_(100)
        try:
            c10d_custom.empty(10_000)
            ok = False
        except dist.DistBackendError:
            pass
        del t
        os._exit(0 if ok else 1)
    _, status = os.waitpid(pid, 0)
    wrong += [f"child: {status}"] if status else []
    wrong += [] if t.eq(rank + 1).all() else ["the child wrote to it"]
    dist.all_reduce(t)
    size = dist.get_world_size()
    return wrong + ([] if t.eq(size * (size + 1) // 2).all() else ["all_reduce"])


@pytest.mark.world_sizes(2)
def test_a_forked_child_has_its_own(ranks):
    assert not any(found := ranks.run(forked_case)), found


def copies_case():
    """What makes other tensors of one, and what changes its storage."""
    rank, size = dist.get_rank(), dist.get_world_size()
    t = c10d_custom.empty(100_000).fill_(rank + 1)
    expected, wrong = float(size * (size + 1) // 2), []

    def reduced(what, u):
        dist.all_reduce(u)
        if not u.eq(expected).all():
            wrong.append(what)

    for what, u in {"clone": t.clone(), "deepcopy": copy.deepcopy(t), "pickle": pickle.loads(pickle.dumps(t))}.items():
        reduced(what, u)
    parameter = torch.nn.Parameter(t)
    (parameter * 2).sum().backward()
    reduced("grad", parameter.grad.mul_((rank + 1) / 2))
    with pytest.raises(RuntimeError, match="resiz"):
        c10d_custom.empty(10_000).resize_(1 << 20)
    shared = c10d_custom.empty(100_000).copy_(t)
    shared.share_memory_()  # moves it to memory of torch's
    reduced("share_memory_", shared)
    view = t.numpy()
    del parameter
    reduced("t", t)
    del t
    gc.collect()
    if not (view == expected).all():
        wrong.append("a numpy view outlives its tensor")
    return wrong


@pytest.mark.world_sizes(2)
def test_copies_and_views(ranks):
    assert not any(found := ranks.run(copies_case)), found
