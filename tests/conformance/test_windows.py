"""One-sided windows (docs/windows.md): what is put is what is read, wherever the memory is; and the page's examples. On
one host ranks write to each other's memory, over hosts (--job) puts are messages."""

import random
import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import c10d_custom
from c10d_custom.errors import CollectiveTimeoutError, UsageError
from harness.groups import group_with_timeout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "windows.md"


def example(name):
    """The function of that name on the page."""
    text = next(t for t in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if f"def {name}(" in t)
    exec(text, found := {})
    return found[name]


def unified(empty=False):
    """``empty``: of a tensor of c10d_custom.empty; any other is moved, by torch 2.12 and newer."""
    return dist.group.WORLD.cpu_transport.has_arena() and (empty or hasattr(torch.UntypedStorage, "_swap_data_ptr_"))


def access(window, rank):
    return window.get_attr(rank).access_type.name


def raises(kind, words, call):
    """[] if the call raises that, with these words; else what it does instead."""
    try:
        call()
    except kind as error:
        return [] if re.search(words, str(error)) else [f"{words!r} is not in: {error}"]
    return [f"no {kind.__name__}: {words}"]


# --- a ring, as torch's own tests of NCCL's windows go


def ring_case(count, dtype, asynchronous, empty, at_once):
    rank, size = dist.get_rank(), dist.get_world_size()
    to, of = (rank + 1) % size, (rank - 1) % size
    make = c10d_custom.empty if empty else torch.empty
    memory = make(count * size, dtype=dtype)
    memory.view(torch.uint8).fill_(1)
    group, wrong = dist.group.WORLD, []
    window = group.new_window(memory if at_once else None)
    if not at_once:
        window.tensor_register(memory)
    if access(window, to) != ("UNIFIED" if unified(empty) else "SEPARATE"):
        wrong.append(access(window, to))
    for r in range(4):
        value = torch.arange(count).add(10 * rank + r).remainder(100).to(dtype)
        expected = torch.arange(count).add(10 * of + r).remainder(100).to(dtype)
        works = [window.put(value, to, to * count, asynchronous), window.signal(to, asynchronous)]
        value.zero_()
        works.append(window.wait_signal(of, asynchronous))
        for work in works if asynchronous else ():
            work.wait()
        mine = window.map_remote_tensor(rank)
        for seen in mine, memory:
            if not torch.equal(seen[rank * count : (rank + 1) * count], expected):
                wrong.append(f"round {r}: {seen}")
        window.signal(of)  # it may put again
        window.wait_signal(to)
    window.tensor_deregister()
    around = torch.cat([memory[: rank * count], memory[(rank + 1) * count :]]).view(torch.uint8)
    return wrong + ([] if around.eq(1).all() else ["memory around it was written"])


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize(
    "count, dtype, asynchronous, empty, at_once",
    [
        (1, torch.float32, False, False, True),
        (1024, torch.int32, True, False, False),
        (65536, torch.int8, False, True, False),
        (300_001, torch.bfloat16, True, True, True),
        (5, torch.bool, False, False, True),
        (7, torch.complex128, False, False, True),
    ],
    ids=str,
)
def test_a_ring(ranks, count, dtype, asynchronous, empty, at_once):
    assert not any(found := ranks.run(ring_case, count, dtype, asynchronous, empty, at_once)), found


# --- the page's examples


def halo_case(per_rank, rounds):
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(per_rank * size, dtype=torch.float64).mul(7).remainder(31)
    mine = example("diffuse")(whole[rank * per_rank : (rank + 1) * per_rank], rounds)
    for _ in range(rounds):
        whole = whole + 0.25 * (whole.roll(1) - 2 * whole + whole.roll(-1))
    return [] if torch.equal(mine, whole[rank * per_rank : (rank + 1) * per_rank]) else [f"{mine}"]


def server_case(count, rounds):
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted = [torch.arange(count, dtype=torch.float32).add(3 * r).remainder(5) for r in range(size)]
    found = example("train")(lambda parameters: parameters - wanted[rank], count, rounds)
    parameters = torch.zeros(count)
    for _ in range(rounds):
        gradients = torch.zeros(size, count)
        for r in range(1, size):
            gradients[r] = parameters - wanted[r]
        parameters = parameters - 0.1 * gradients[1:].sum(0)
    return [] if torch.equal(found, parameters) else [f"{found} {parameters}"]


@pytest.mark.world_sizes(2, 3, 4)
def test_the_halo_exchange_of_the_page(ranks):
    assert not any(found := ranks.run(halo_case, 50, 40)), found


@pytest.mark.world_sizes(2, 4)
def test_the_parameter_server_of_the_page(ranks):
    assert not any(found := ranks.run(server_case, 1000, 20)), found


# --- random programs: a rank's memory is what a model of it says


def random_case(seed):
    """Rounds in which each rank puts some pieces into places of its own in others' memory, and signals."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plan, wrong = random.Random(seed), []
    each = [plan.choice((40, 3000, 50_000)) for _ in range(size)]  # a rank's place in each rank's memory
    dtypes = [plan.choice((torch.float32, torch.int64, torch.uint8)) for _ in range(size)]
    memory = torch.zeros(each[rank] * size, dtype=dtypes[rank])
    expected = memory.clone()
    window = dist.group.WORLD.new_window(memory)
    for r in range(12):
        for source in range(size):
            for target in range(size):
                for _ in range(plan.randrange(3)):
                    count = plan.randrange(each[target] + 1)
                    at = source * each[target] + plan.randrange(each[target] - count + 1)
                    values = torch.arange(count).add(r + source + target).remainder(97).to(dtypes[target])
                    if source == rank:
                        window.put(values, target, at)
                    if target == rank:
                        expected[at : at + count] = values
        for peer in range(size):
            window.signal(peer)
        for peer in plan.sample(range(size), size):
            window.wait_signal(peer)
        if not torch.equal(memory, expected):
            wrong.append(f"round {r}")
        for peer in range(size):
            window.signal(peer)
        for peer in range(size):
            window.wait_signal(peer)
    window.tensor_deregister()
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_random_programs(ranks):
    assert not any(found := ranks.run(random_case, 5)), found


# --- registration


def registration_case():
    rank, size = dist.get_rank(), dist.get_world_size()
    group, wrong, peer = dist.group.WORLD, [], (rank + 1) % size
    base = torch.zeros(6, 5)
    row = base[2]  # a view: the whole storage moves, and both see it
    window = group.new_window(row)
    window.put(torch.full((5,), 3.0), peer, 0)  # without a signal: deregister brings it
    window.put(torch.empty(0), peer, 5)
    window.tensor_deregister()
    wrong += [] if row.eq(3).all() and base[2].eq(3).all() and base.sum() == 15 else [f"{base}"]
    # Again, of another size and dtype on each rank, one of them empty.
    other = torch.zeros(3 * rank, dtype=(torch.float64, torch.int16)[rank % 2])
    window.tensor_register(other, owning=False)
    dtype = (torch.float64, torch.int16)[peer % 2]
    window.put(torch.full((3 * peer,), 7, dtype=dtype), peer, 0)
    window.signal(peer)
    window.wait_signal((rank - 1) % size)
    wrong += [] if other.eq(7).all() else [f"{other}"]
    if unified():
        theirs = window.map_remote_tensor(peer)
        wrong += [] if (theirs.shape, theirs.dtype) == ((3 * peer,), dtype) else [f"{theirs}"]
    else:
        wrong += raises(UsageError, "cannot be mapped here: ", lambda: window.map_remote_tensor(peer))
    window.tensor_deregister()
    # A window that is dropped stays registered: its memory is not given to another tensor.
    dropped = group.new_window(torch.zeros(30_000))
    del dropped
    return wrong


def mapped_case():
    """What one writes the other reads; also when window and group are gone."""
    rank, wrong = dist.get_rank(), []
    group = dist.new_group()
    memory = torch.zeros(3, 4)
    window = group.new_window(memory)
    if not unified():
        return []
    theirs = window.map_remote_tensor(1 - rank)
    theirs[1, 2] = rank + 1
    window.signal(1 - rank)
    window.wait_signal(1 - rank)
    wrong += [] if memory[1, 2] == 2 - rank and memory.sum() == 2 - rank else [f"{memory}"]
    dist.barrier()
    memory[0, 0] = 9
    dist.barrier()
    wrong += [] if theirs[0, 0] == 9 else [f"{theirs}"]
    dist.destroy_process_group(group)
    del window, group
    dist.barrier()
    memory[0, 1] = 8
    dist.barrier()
    wrong += [] if theirs[0, 1] == 8 and theirs[0, 0] == 9 else ["not after the group"]
    dist.barrier()
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_registration(ranks):
    assert not any(found := ranks.run(registration_case)), found


@pytest.mark.world_sizes(2)
def test_mapped_memory(ranks):
    assert not any(found := ranks.run(mapped_case)), found


# --- waits


def waits_case():
    rank, wrong = dist.get_rank(), []
    group = group_with_timeout(timedelta(seconds=30))
    memory = torch.zeros(4)
    window = group.new_window(memory)
    if rank == 0:
        options = dist.distributed_c10d.BarrierOptions()  # any that has a time-out; torch 2.15 has WaitSignalOptions
        options.timeout = timedelta(milliseconds=50)
        late = "Timed out after .*: rank 1 has not signalled"
        wrong += raises(CollectiveTimeoutError, late, lambda: window.wait_signal(1, False, options))
        first, second = (window.wait_signal(1, True) for _ in range(2))
        third = window.wait_signal(1, True)
        called, future = [], third.get_future()
        future.then(lambda f: called.append(f.value()))
        wrong += ["done at once"] if first.is_completed() or second.is_completed() else []
        wrong += raises(CollectiveTimeoutError, "not done after", lambda: first.wait(timedelta(milliseconds=20)))
        dist.barrier()
        second.wait()
        wrong += [] if first.is_completed() and memory[0] == 2 else [f"in another order: {memory}"]
        wrong += ["the third came with the second"] if third.is_completed() else []
        dist.barrier()
        future.wait()
        wrong += [] if third.is_completed() and memory[0] == 3 else [f"{memory}"]
        for _ in range(500):
            if called:
                break
            time.sleep(0.01)
        wrong += [] if called == [[]] else [f"the callback: {called}"]
        # Signals that come first are kept.
        dist.barrier()
        window.wait_signal(1)
        window.wait_signal(1)
        wrong += raises(CollectiveTimeoutError, late, lambda: window.wait_signal(1, False, options))
    elif rank > 1:
        for _ in range(3):
            dist.barrier()
    else:
        dist.barrier()
        for value in (1.0, 2.0):
            window.put(torch.tensor([value]), 0, 0)
            window.signal(0)
        dist.barrier()
        window.put(torch.tensor([3.0]), 0, 0)
        window.signal(0)
        window.signal(0)
        window.signal(0)
        dist.barrier()
    window.tensor_deregister()
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_waits(ranks):
    assert not any(found := ranks.run(waits_case)), found


def threads_case():
    """Two threads of each rank, each with a window of its own, beside collectives."""
    rank, wrong = dist.get_rank(), []
    group = dist.group.WORLD
    memories = [torch.zeros(100), torch.zeros(100)]
    windows = [group.new_window(m) for m in memories]

    def ping_pong(window, memory, mine):
        for r in range(100):
            window.put(torch.full((100,), float(2 * r + mine)), 1 - rank, 0)
            window.signal(1 - rank)
            window.wait_signal(1 - rank)
            if not memory.eq(2 * r + mine).all():
                wrong.append(f"{memory}")
            window.signal(1 - rank)
            window.wait_signal(1 - rank)

    threads = [threading.Thread(target=ping_pong, args=(*pair, i)) for i, pair in enumerate(zip(windows, memories))]
    for t in threads:
        t.start()
    for _ in range(50):
        total = torch.ones(10)
        dist.all_reduce(total)
        wrong += [] if total.eq(2).all() else ["all_reduce"]
    for t in threads:
        t.join()
    for w in windows:
        w.tensor_deregister()
    return wrong


@pytest.mark.world_sizes(2)
def test_threads(ranks):
    assert not any(found := ranks.run(threads_case)), found


# --- what is refused


def refusals_case():
    rank, size = dist.get_rank(), dist.get_world_size()
    group, wrong = dist.group.WORLD, []
    window, memory = group.new_window(), torch.zeros(16)
    one = torch.ones(1)

    def refused(words, call):
        wrong.extend(raises(UsageError, words, call))

    for call in (
        lambda: window.put(one, 0, 0),
        lambda: window.signal(0),
        lambda: window.wait_signal(0),
        lambda: window.get_attr(0),
        lambda: window.map_remote_tensor(0),
        window.tensor_deregister,
    ):
        refused("not registered", call)
    window.tensor_register(memory)
    refused("double registration", lambda: window.tensor_register(memory))
    refused("exceeds the window size of rank 0, 16 elements", lambda: window.put(torch.ones(16), 0, 8))
    refused("exceeds the window size", lambda: window.put(one, 0, 16))
    refused("exceeds the window size", lambda: window.put(one, 0, -1))
    refused("exceeds the window size", lambda: window.put(one, 0, 1 << 70))
    refused("of torch.float64, the window of rank 0 of torch.float32", lambda: window.put(one.double(), 0, 0))
    refused("not contiguous", lambda: window.put(torch.ones(4, 4).t(), 0, 0))
    refused("not contiguous", lambda: window.put(torch.ones(1).expand(4), 0, 0))
    refused("on meta: windows are of CPU tensors", lambda: window.put(one.to("meta"), 0, 0))
    refused("expected a tensor", lambda: window.put([1.0], 0, 0))
    for bad in (-1, size, "0", 1 << 40, None):
        refused("there is no rank", lambda: window.put(one, bad, 0))
        refused("there is no rank", lambda: window.signal(bad))
        refused("there is no rank", lambda: window.wait_signal(bad))
        refused("there is no rank", lambda: window.map_remote_tensor(bad))
        refused("there is no rank", lambda: window.get_attr(bad))
    leaf = torch.full((2,), 5.0, requires_grad=True)
    window.put(leaf, rank, 3)
    wrong += [] if memory.tolist() == [0, 0, 0, 5, 5, *[0] * 11] else [f"{memory}"]
    window.tensor_deregister()
    # One rank's tensor is refused: all ranks hear why, and go on.
    bad_ones = [
        ("not contiguous", torch.ones(4, 4).t()),
        ("on meta: windows are of CPU tensors only", torch.ones(3, device="meta")),
        ("expected a tensor", None),
    ]
    if unified():
        bad_ones.append(("another's", torch.from_numpy(torch.zeros(3).numpy())))
    for words, bad in bad_ones:
        who = "" if rank == size - 1 else f"rank {size - 1} refused its tensor: .*"
        refused(who + words, lambda: window.tensor_register(bad if rank == size - 1 else memory))
    first, second = group.new_window(), group.new_window()
    refused("the ranks register different windows", lambda: (second if rank else first).tensor_register(memory))
    first.tensor_register(memory)
    first.tensor_deregister()
    return wrong


@pytest.mark.world_sizes(2, 4)
def test_refusals(ranks):
    assert not any(found := ranks.run(refusals_case)), found


def supported_case():
    group, device = dist.group.WORLD, torch.device("cpu")
    said = [group.supports_window, group._get_backend(device).supports_window]
    if hasattr(dist, "_supports_window"):
        said.append(dist._supports_window())
        window = dist._new_window(torch.zeros(3))
        from torch._C._distributed_c10d import WindowAccessType

        said.append(isinstance(window.get_attr(0).access_type, WindowAccessType))
        window.tensor_deregister()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mine = torch.zeros(3)
    window = alone.new_window(mine)
    window.put(torch.ones(2), 0, 1)
    window.signal(0)
    window.wait_signal(0)
    window.tensor_deregister()
    said.append(mine.tolist() == [0, 1, 1])
    dist.destroy_process_group(alone)
    return [] if all(said) else said


@pytest.mark.world_sizes(2)
def test_what_is_said_of_them(ranks):
    assert not any(found := ranks.run(supported_case)), found
