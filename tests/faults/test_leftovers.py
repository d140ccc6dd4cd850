"""A group leaves nothing behind: no thread, descriptor, mapping, process or file; no memory where it failed; nothing
that a later group would take for its own."""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.c10d import process_group
from c10d_custom.c10d.issuing import NewGroup
from c10d_custom.creation.bounded_store import BoundedStore
from harness.shm import in_dev_shm


def belongings():
    """What this process holds that a group could have left."""
    gc.collect()
    time.sleep(1.5)  # idle threads end after a second
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:c10d_custom" in line for line in maps)
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments mapped": mapped,
    }


def one_life():
    """Create a group, use every engine of it, destroy it."""
    group = dist.new_group()
    rank, size = group.rank(), group.size()
    dist.all_reduce(torch.ones(4), group=group)
    work = dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True)
    work.get_future().wait()
    request = dist.isend(torch.ones(1 << 15), group=group, group_dst=(rank + 1) % size)
    dist.recv(torch.ones(1 << 15), group=group, group_src=(rank - 1) % size)
    request.wait()
    strided = torch.ones(64)[::2]
    dist.all_reduce(strided, group=group, async_op=True).wait()
    dist.destroy_process_group(group)


def cycles_case(cycles, warm=5):
    for _ in range(warm):  # what the first group makes the process hold for good
        one_life()
    before = belongings()
    for _ in range(cycles):
        one_life()
    dist.barrier()
    after = belongings()
    return None if before == after else (before, after)


@pytest.mark.world_sizes(2)
def test_a_hundred_groups_leave_nothing(ranks):
    before = in_dev_shm()
    assert not any(found := ranks.run(cycles_case, 100, timeout=240)), found
    assert not in_dev_shm() - before


def threads_at_rest():
    """How many there are once none has ended for longer than one that nobody needs lasts."""
    fewest, since = len(os.listdir("/proc/self/task")), time.monotonic()
    while time.monotonic() - since < 1.5:
        time.sleep(0.1)
        if (now := len(os.listdir("/proc/self/task"))) < fewest:
            fewest, since = now, time.monotonic()
    return fewest


def many_groups_case(many):
    groups = [dist.new_group() for _ in range(many)]
    for group in groups:
        dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True).wait()
        request = dist.isend(torch.ones(1 << 15), group=group, group_dst=1 - group.rank())
        dist.recv(torch.ones(1 << 15), group=group, group_src=1 - group.rank())
        request.wait()
    native = threads_at_rest()
    for group in groups:
        dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True).get_future().wait()
    found = native, threads_at_rest()
    for group in groups:
        dist.destroy_process_group(group)
    return found


@pytest.mark.world_sizes(2)
def test_threads_do_not_grow_with_groups(ranks):
    if ranks.layout is not None:
        pytest.skip("over hosts each group has one that hears of failures")
    found = ranks.run(many_groups_case, 48)
    assert all(threads < 8 for each in found for threads in each), found


class Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def in_use():
    """(bytes that malloc has given out, blocks that Python's own allocator has). Resident memory says little:
    what malloc keeps for later comes and goes by megabytes, by twenty of them in threads that fail amid large calls."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    gc.collect()
    info = mallinfo2()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


def thousands_case(cycles):
    cycles_case(300)
    before = in_use()
    wrong = cycles_case(cycles)
    size, blocks = ((after - once) / cycles for after, once in zip(in_use(), before, strict=True))
    # torch keeps a name and an empty list of each group that there was: 250 bytes, 4 blocks
    return wrong or (f"{size:.0f} bytes and {blocks:.1f} blocks a group" if size > 800 or blocks > 8 else None)


@pytest.mark.world_sizes(4)
def test_groups_over_hosts_leave_nothing(ranks):
    if ranks.layout is None:
        pytest.skip("between hosts; on one: above")
    assert not any(found := ranks.run(cycles_case, 60, 20, timeout=120)), found


@pytest.mark.full("the same, longer")
@pytest.mark.timeout(600)
@pytest.mark.world_sizes(4)
def test_thousands_of_groups_leave_nothing(ranks):
    assert not any(found := ranks.run(thousands_case, 3000, timeout=580)), found


FAILURES = {
    "disagreement, small": lambda group, odd: dist.all_reduce(torch.ones(5 if odd else 4), group=group),
    "disagreement, large": lambda group, odd: dist.all_reduce(torch.ones(1 << (19 if odd else 18)), group=group),
    "roots": lambda group, odd: dist.broadcast(torch.ones(1 << 18), int(odd), group),
    "amid": lambda group, odd: group.abort() if odd else dist.all_reduce(torch.ones(1 << 20), group=group),
}


def one_failure(kind):
    """A group that has used every way between hosts, has a message under way, and fails."""
    group = dist.new_group()
    rank, size = group.rank(), group.size()
    for count in (1, 3000, 1 << 18):
        dist.all_reduce(torch.ones(count), group=group)
    with contextlib.suppress(dist.DistBackendError):
        dist.barrier(group)  # which the last rank may be through with, and abort, before another one is
        dist.isend(torch.ones(1 << 15), group=group, group_dst=(rank + size // 2) % size)
        FAILURES[kind](group, rank == size - 1)
    assert group.cpu_transport.broken()
    dist.destroy_process_group(group)


def settled():
    """What `in_use` gives once nothing is under way any more, which is looked at when a group is made."""
    seen = []
    for _ in range(6):
        dist.barrier()
        dist.destroy_process_group(dist.new_group())
        seen.append(in_use()[0])
        time.sleep(0.1)
    return min(seen)


def failures_case(kind, cycles):
    for _ in range(15):  # what MPI and malloc keep for good
        one_failure(kind)
    before = settled()
    for _ in range(cycles):
        one_failure(kind)
    return (settled() - before) / cycles


@pytest.mark.world_sizes(4)
@pytest.mark.parametrize("kind", FAILURES)
def test_a_group_that_failed_frees_its_memory(ranks, kind):
    """Some 2 MB; MPI keeps some 10 KB of a communicator, and takes a megabyte for itself now and then."""
    assert max(ranks.run(failures_case, kind, 15)) < 200_000


def unreceived_case():
    """What a group has sent and nobody received: messages, and that a call was refused."""
    rank, last, wrong = dist.get_rank(), dist.get_world_size() - 1, []

    def a_group_of_all(fill):
        group = dist.new_group()
        dist.barrier(group)
        try:
            for tag, count in enumerate((4, 5000, 1 << 18)):
                if rank == 0:
                    dist.isend(torch.full((count,), fill), last, tag=tag, group=group)
            if fill == 1:
                for _ in range(3):
                    with contextlib.suppress(ValueError):
                        dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND, group=group)
                dist.barrier()  # of another group: all have come so far
            else:
                for tag, count in enumerate((4, 5000, 1 << 18)):
                    x = torch.zeros(count)
                    if rank == last:
                        dist.recv(x, 0, tag=tag, group=group)
                        wrong.extend([] if x.eq(fill).all() else [f"{count} elements: {x}"])
                x = torch.ones(4)
                dist.all_reduce(x, group=group)
                wrong.extend([] if x.eq(last + 1).all() else [f"all_reduce: {x}"])
        except dist.DistBackendError as error:
            wrong.append(str(error))
        dist.barrier()
        dist.destroy_process_group(group)

    for fill in (1.0, 2.0, 1.0, 2.0):
        a_group_of_all(fill)
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_a_later_group_gets_nothing_of_one_that_is_gone(ranks):
    """MPI may give it the other's communicator."""
    assert not any(found := ranks.run(unreceived_case)), found


def keys_of_failed_case():
    return keys_case(fail=True)


@pytest.mark.world_sizes(2, 4)
def test_a_group_that_failed_leaves_no_keys_in_the_store(ranks):
    """But what its ranks have told each other of the failure."""
    for before, meanwhile, after in ranks.run(keys_of_failed_case):
        assert before == meanwhile == after


def questions_case():
    """How often the store was asked for each of some groups; it is where ranks have waited long for each other."""
    asked, ask, counts = [], BoundedStore._ask, []
    BoundedStore._ask = lambda self, *call: asked.append(call) or ask(self, *call)
    try:
        for _ in range(5):
            dist.barrier()
            asked.clear()
            group = dist.new_group()
            counts.append(len(asked))
            t = torch.ones(3)
            dist.all_reduce(t, group=group)
            assert t.tolist() == [group.size()] * 3
            dist.destroy_process_group(group)
    finally:
        BoundedStore._ask = ask
    return counts


@pytest.mark.world_sizes(2, 4)
def test_ranks_of_a_host_make_a_group_without_the_store(ranks):
    if ranks.layout is not None and len(ranks.layout.ranks_per_host) > 1:
        pytest.skip("inside a host; between hosts the store is asked: mpi/test_start_up.py")
    assert all(0 in counts for counts in ranks.run(questions_case))


def keys_case(fail=False):
    """Keys in the store: before, while groups are there, and after."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("keys_case", dist.distributed_c10d._get_default_store())

    def keys():
        dist.barrier()
        number = store.num_keys()
        dist.barrier()
        return number

    def made(name):
        part = dist.PrefixStore(name, store)
        group = process_group.build(NewGroup(part, rank, size, timedelta(seconds=60), name))
        t = torch.ones(3)
        group.allreduce(t).wait()
        assert t.tolist() == [size] * 3
        return group

    counts = [keys()]
    groups = [made(f"group {i}") for i in range(3)]
    counts.append(keys())
    for group in groups:
        if fail:
            with pytest.raises(dist.DistBackendError):
                group.allreduce(torch.ones(3 + (rank == 0))).wait()
        group.shutdown()
    for _ in range(5):  # one name again and again, as ranks come, which is not at the same time
        made("again").shutdown()
    counts.append(keys())
    return counts


@pytest.mark.world_sizes(2, 4)
def test_a_group_leaves_no_keys_in_the_store(ranks):
    for before, meanwhile, after in ranks.run(keys_case):
        assert before == meanwhile == after


def communicators_case():
    """How many handles MPICH gives the communicators of groups that come one after the other; None: another MPI, or one
    host."""
    seen = set()
    for _ in range(40):
        group = dist.new_group()
        link = getattr(group.cpu_transport, "link", None)
        if link is None or link.MPI.get_vendor()[0] != "MPICH":
            dist.destroy_process_group(group)
            return None
        for count in (1, 3000, 1 << 16):  # one for each algorithm
            t = torch.ones(count)
            dist.all_reduce(t, group=group)
            assert t.eq(dist.get_world_size()).all()
        seen.add(link.MPI._handleof(link.comm))
        dist.destroy_process_group(group)
    return len(seen)


@pytest.mark.world_sizes(4)
def test_mpi_gets_its_communicators_back(ranks):
    """Of which MPICH has 2,048 in a process. A request that is not freed holds one."""
    found = ranks.run(communicators_case)
    if None in found:
        pytest.skip("between hosts only, with MPICH")
    assert max(found) < 10


def dropped_tensors_case():
    """Works nobody waits for do not keep their tensors for ever."""
    import weakref

    tensors = []
    for _ in range(50):
        t = torch.ones(1 << 12)
        tensors.append(weakref.ref(t))
        dist.all_reduce(t, async_op=True)
        del t
    dist.barrier()
    for _ in range(20):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    gc.collect()
    alive = sum(t() is not None for t in tensors)
    return None if alive == 0 else alive


@pytest.mark.world_sizes(2)
def test_works_nobody_waits_for_let_go_of_their_tensors(ranks):
    assert not any(found := ranks.run(dropped_tensors_case)), found
