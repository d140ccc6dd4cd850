"""Starting, ending and starting again in one process; stores; objects; many groups."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from .spawn import backend, run


def check(rank, size, group=None):
    value = torch.arange(3.0) + rank
    dist.all_reduce(value, group=group)
    assert value.tolist() == [size * i + sum(range(size)) for i in range(3)]


def again_and_again(rank, size, folder):
    """Ten lives of the default group, by FileStore; none leaves threads or descriptors behind."""

    def life(i):
        store = dist.FileStore(os.path.join(folder, f"life{i}"), size)
        dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        check(rank, size)
        part = dist.new_group(list(range(size)))
        check(rank, size, part)
        dist.destroy_process_group()
        assert not dist.is_initialized()

    def held():
        return {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}

    for i in range(3):
        life(i)
    before = held()
    for i in range(3, 10):
        life(i)
    return before, held()


def test_ten_lives_in_one_process(tmp_path):
    for before, after in run(again_and_again, 2, str(tmp_path), init=False):
        # Seven more lives; a leak would be of at least one each.
        assert all(after[k] < before[k] + 7 for k in before), (before, after)


def explicit_stores(rank, size, folder):
    """Stores that the caller made, wrapped, and shared with the caller's own keys."""
    file_store = dist.FileStore(os.path.join(folder, "shared"), size)
    file_store.set(f"mine{rank}", "1")
    for store in (dist.PrefixStore("a", file_store), dist.PrefixStore("b/", dist.PrefixStore("c", file_store))):
        dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        check(rank, size)
        dist.destroy_process_group()
    assert file_store.get(f"mine{rank}") == b"1"


def test_explicit_stores(tmp_path):
    run(explicit_stores, 2, str(tmp_path), init=False)


class Least(dist.Store):
    """What a class in Python has at least, such as torch's own EtcdStore."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, amount):
        return self.inner.add(key, amount)

    def check(self, keys):
        return self.inner.check(keys)

    def wait(self, keys, *timeout):
        self.inner.wait(keys, *timeout)


class AsPythonCallsThem(Least):
    """With methods that C++ knows by another name, or does not look for."""

    def compare_set(self, key, expected, desired):
        return self.inner.compare_set(key, expected, desired)

    def delete_key(self, key):
        return self.inner.delete_key(key)


class Whole(AsPythonCallsThem):
    def deleteKey(self, key):  # noqa: N802
        return self.inner.delete_key(key)


def stores_in_python(rank, size, folder):
    """Each for two lives of the default group, the second over what the first has left there."""
    file_store = dist.FileStore(os.path.join(folder, "shared"), size)
    for kind in (Least, AsPythonCallsThem, Whole):
        store = kind(dist.PrefixStore(kind.__name__, file_store))
        for _ in range(2):
            dist.init_process_group(backend(), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
            for ranks in (list(range(size)), [1, 0]):
                group = dist.new_group(ranks)
                if rank in ranks:
                    check(rank, len(ranks), group)
            dist.barrier()
            dist.destroy_process_group()


def test_stores_in_python(tmp_path):
    run(stores_in_python, 3, str(tmp_path), init=False)


def one_rank(rank, size):
    dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1)
    value = torch.tensor([5.0])
    dist.all_reduce(value)
    dist.broadcast(value, 0)
    gathered = [torch.zeros(1)]
    dist.all_gather(gathered, value)
    dist.barrier()
    assert value.item() == 5.0 and gathered[0].item() == 5.0
    dist.destroy_process_group()


def test_a_world_of_one_by_hash_store():
    run(one_rank, 2, init=False)


def objects(rank, size):
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (1000 * rank)})
    assert [len(g["text"]) for g in gathered] == [1000 * r for r in range(size)]
    some = [{"from": rank}, None, rank] if rank == 1 else [None] * 3
    dist.broadcast_object_list(some, src=1)
    assert some == [{"from": 1}, None, 1]
    collected = [None] * size if rank == 1 else None
    dist.gather_object(("item", rank), collected, dst=1)
    if rank == 1:
        assert collected == [("item", r) for r in range(size)]
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([1, "two", [3]], dst=1)
    elif rank == 1:
        received = [None] * 3
        dist.recv_object_list(received, src=0)
        assert received == [1, "two", [3]]


def test_objects():
    run(objects, 4)


def many_groups(rank, size):
    """Groups that overlap, are used out of order, and are destroyed one by one."""
    made = []
    for members in ([0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2, 3], [0], [1], [2], [3]):
        made.append((members, dist.new_group(members)))
    for members, group in reversed(made):
        if rank in members:
            value = torch.tensor([1 << rank])
            dist.all_reduce(value, group=group)
            assert value.item() == sum(1 << r for r in members)
    for members, group in made[:4]:
        if rank in members:
            dist.destroy_process_group(group)
    check(rank, size, made[4][1])
    mine, groups = dist.new_subgroups(2)
    value = torch.tensor([rank])
    dist.all_reduce(value, group=mine)
    assert value.item() == rank // 2 * 4 + 1
    mine, groups = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    value = torch.tensor([rank])
    dist.all_reduce(value, group=mine)
    assert value.item() == rank % 2 * 2 + 2
    check(rank, size)


def test_many_groups():
    run(many_groups, 4)


def in_flight(rank, size):
    """Collectives of two groups in flight together, waited for in another order than started."""
    other = dist.new_group(list(range(size)))
    works = []
    for i in range(8):
        value = torch.full((1000,), float(rank + i))
        works.append((i, value, dist.all_reduce(value, group=other if i % 2 else None, async_op=True)))
    for i, value, work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert torch.equal(value, torch.full((1000,), float(sum(range(size)) + i * size)))
    # Futures, with a callback chained on.
    value = torch.tensor([float(rank)])
    future = dist.all_reduce(value, async_op=True).get_future().then(lambda f: f.value()[0] * 10)
    assert future.wait().item() == 10.0 * sum(range(size))


def test_collectives_in_flight():
    run(in_flight, 2)
