"""A group leaves nothing behind: no thread, descriptor, mapping, process or file."""

import gc
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.c10d import process_group
from c10d_custom.creation.bounded_store import BoundedStore
from harness.shm import in_dev_shm


def belongings():
    """What this process holds that a group could have left."""
    gc.collect()
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


def cycles_case(cycles):
    for _ in range(5):  # what the first group makes the process hold for good
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
    assert all(0 in counts for counts in ranks.run(questions_case))


def keys_case():
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
        group = process_group.build(part, rank, size, timedelta(seconds=60), name)
        t = torch.ones(3)
        group.allreduce(t).wait()
        assert t.tolist() == [size] * 3
        return group

    counts = [keys()]
    groups = [made(f"group {i}") for i in range(3)]
    counts.append(keys())
    for group in groups:
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
