"""Large messages of CUDA tensors, in pieces, on a simulated GPU: which way they go, what they take, what goes wrong."""

import ctypes
import time
from datetime import timedelta

import pytest
import torch

from c10d_custom.call import Message, Region
from c10d_custom.config import Config
from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError, CustomBackendError
from c10d_custom.transport.cuda import pieces
from c10d_custom.transport.cuda.algorithm import MESSAGE_SLOTS, piece_bytes, whole_bytes
from c10d_custom.transport.cuda.host_exchange import BYTES
from device_tensors import contents, device_tensor
from fake_world import World
from thread_ranks import SMALL, cpu_tensors, run_ranks

PIECE = SMALL["cuda_staging_bytes"] // MESSAGE_SLOTS
N = 5 * PIECE // 4 + 3  # elements: six pieces


def messages_of(r):
    return next(iter(r.pg._transport._cuda.values()))._messages


def exchanged(r, count=N, tags=(0,)):
    """Sends all, receives in the other order; what has come is right."""
    other = 1 - r.rank
    into = [torch.zeros(count) for _ in tags]
    r.keep += into
    works = [r.pg.send([device_tensor(r, count, 10.0 * r.rank + tag)], other, tag) for tag in tags]
    works += [r.pg.recv([into[i]], other, tag) for i, tag in reversed([*enumerate(tags)])]
    for work in works:
        work.wait()
    assert [contents(r, t).unique().tolist() for t in into] == [[10.0 * other + tag] for tag in tags]


def ways(world, config=None, gpus=None, before=lambda r: None):
    """(which way each rank's messages have come, bytes of pinned memory that each rank has taken for slots)"""

    def body(r):
        taken, real = [], r.driver.allocate_pinned
        r.driver.allocate_pinned = lambda nbytes: taken.append(nbytes) or real(nbytes)
        before(r)
        exchanged(r)
        opened = messages_of(r).pieces.opened
        return [bool(address) for address in opened.values()], sum(n for n in taken if n > 64)

    return run_ranks(2, body, config=config, gpus=gpus, world=world)


def refuses(r):
    if r.rank:
        r.driver.fails["open_memory"] = RuntimeError("CUDA_ERROR_INVALID_VALUE")


def reads_what_nobody_has_written(r):
    if r.rank:
        opens, closes = r.driver.open_memory, r.driver.close_memory
        r.driver.open_memory = lambda handle: opens(handle) + 512
        r.driver.close_memory = lambda address: closes(address - 512)


BOTH_POOLS, ONE_POOL = [2 * MESSAGE_SLOTS * PIECE] * 2, [MESSAGE_SLOTS * PIECE] * 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "before, settings, opened, pinned",
    [
        (lambda r: None, {}, [[True], [True]], [0, 0]),
        (lambda r: None, {"cuda_mode": "staged"}, [[], []], BOTH_POOLS),
        (refuses, {}, [[True], [False]], ONE_POOL),
        (reads_what_nobody_has_written, {}, [[True], [False]], ONE_POOL),
    ],
    ids=["from GPU to GPU", "through host memory", "one cannot open the other's", "one reads garbage"],
)
def test_the_way_is_what_works(before, settings, opened, pinned, seed):
    got = ways(World(seed), settings, before=before)
    assert [o for o, _ in got] == opened and [p for _, p in got] == pinned


def test_gpus_that_do_not_reach_each_other_take_host_memory():
    world = World(1)
    world.separate = True
    assert ways(world, gpus=["GPU-0", "GPU-1"]) == [([False], BOTH_POOLS[0])] * 2


@pytest.mark.parametrize("mode", ["auto", "staged"])
def test_messages_in_any_order_share_few_slots(mode):
    for seed in range(4):
        run_ranks(2, lambda r: exchanged(r, tags=range(7)), seed=seed, config={"cuda_mode": mode})


@pytest.mark.parametrize("mode", ["auto", "staged"])
def test_a_group_may_end_as_soon_as_a_message_has_come(mode):
    """What is read then is the sender's, which must hear that it was."""

    def body(r):
        if r.rank:
            r.pg.send([device_tensor(r, N, 3.0)], 0).wait()
            return None
        into = torch.zeros(N)
        r.keep.append(into)
        r.pg.recv([into], 1).wait()
        r.pg.shutdown()
        return into.unique().tolist()

    for seed in range(4):
        assert run_ranks(2, body, seed=seed, laziness=1.0, config={"cuda_mode": mode})[0] == [3.0]


def test_messages_from_anywhere_and_to_oneself():
    def body(r):
        into = [torch.zeros(N) for _ in range({0: 3, 1: 1, 2: 0}[r.rank])]
        r.keep += into
        to = [0] if r.rank else [0, 1]
        works = [r.pg.send([device_tensor(r, N, float(r.rank))], peer) for peer in to]
        receives = [r.pg.recv_anysource([t]) for t in into]
        for work in works + receives:
            work.wait()
        values = [float(contents(r, t).unique()) for t in into]
        assert values == [float(work.source_rank()) for work in receives]
        return sorted(values)

    assert run_ranks(3, body, seed=2) == [[0.0, 1.0, 2.0], [0.0], []]


@pytest.mark.parametrize("there", [N - 1, N + 4], ids=["fewer", "more"])
def test_messages_of_different_sizes_are_told_and_the_group_goes_on(there):
    def body(r):
        count = there if r.rank else N
        with pytest.raises(CollectiveMismatchError, match="bytes") as raised:
            if r.rank:
                r.pg.send([device_tensor(r, count, 1.0)], 0).wait()
            else:
                t = torch.zeros(count)
                r.keep.append(t)
                r.pg.recv([t], 1).wait()
        assert f"{4 * count} bytes" in str(raised.value)
        exchanged(r)

    run_ranks(2, body)


def test_a_small_one_for_a_large_one_is_told():
    """To the receiver: the sender, of a message so small, is done with it."""

    def body(r):
        if r.rank:
            return r.pg.send([device_tensor(r, 10, 1.0)], 0).wait()
        t = torch.zeros(N)
        r.keep.append(t)
        with pytest.raises(CollectiveMismatchError, match=f"receives {4 * N} bytes of float32, rank 1 sends 40 bytes"):
            r.pg.recv([t], 1).wait()
        return True

    run_ranks(2, body)


def test_a_tensor_of_the_cpu_is_no_match_for_a_large_one_of_a_gpu():
    def body(r):
        if r.rank == 0:
            with pytest.raises(CollectiveMismatchError, match="go to a CUDA tensor only"):
                r.pg.send([device_tensor(r, N, 1.0)], 1).wait()
            return
        with pytest.raises(CollectiveMismatchError), cpu_tensors():
            r.pg.recv([torch.zeros(N)], 0).wait()

    run_ranks(2, body)


@pytest.mark.parametrize("is_recv", [True, False], ids=["receive", "send"])
def test_one_that_is_alone_times_out_and_the_group_goes_on(is_recv):
    def body(r):
        if r.rank == 0:
            t = device_tensor(r, N, 1.0)
            r.pg.set_timeout(timedelta(seconds=0.3))
            with pytest.raises(CollectiveTimeoutError, match=f"Did rank 1 {'send' if is_recv else 'receive'} it"):
                (r.pg.recv([t], 1, 5) if is_recv else r.pg.send([t], 1, 5)).wait()
            r.pg.set_timeout(timedelta(seconds=60))
        exchanged(r)

    run_ranks(2, body)


@pytest.mark.parametrize("mode", ["auto", "staged"])
def test_a_rank_that_stops_amid_a_message_ends_it_for_both(mode):
    """Its GPU takes no more pieces than there are slots."""
    staging = 4 * SMALL["cuda_staging_bytes"]  # the CPU's transport takes no piece before its receive is there
    count = 5 * staging // MESSAGE_SLOTS // 4 + 3

    def body(r):
        if r.rank == 0:
            work = r.pg.send([device_tensor(r, count, 1.0)], 1)
            with pytest.raises(CustomBackendError):
                work.wait()
            return None
        over, into = [], torch.zeros(count)
        r.keep.append(into)
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: None, ready=lambda: bool(over))
        work = r.pg.recv([into], 0)
        messages, until = messages_of(r), time.monotonic() + 30
        while not any(t.copied == MESSAGE_SLOTS for t in messages._live) and time.monotonic() < until:
            messages.progress()
        (transfer,) = messages._live
        r.pg.abort()
        with pytest.raises(CustomBackendError):
            work.wait()
        over.append(1)
        return transfer.copied

    config = {"cuda_mode": mode, "cuda_staging_bytes": staging}
    assert run_ranks(2, body, config=config) == [None, MESSAGE_SLOTS]


def test_a_gpu_that_does_not_come_to_a_message_is_named():
    def body(r):
        if r.rank:
            into = torch.zeros(N)
            r.keep.append(into)
            with pytest.raises(CustomBackendError):
                r.pg.recv([into], 0).wait()
            return
        t, over = device_tensor(r, N, 1.0), []
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: None, ready=lambda: bool(over))
        r.pg.set_timeout(timedelta(seconds=0.5))
        try:
            with pytest.raises(CollectiveTimeoutError, match="cuda:0 has not finished"):
                r.pg.send([t], 1).wait()
        finally:
            over.append(1)

    run_ranks(2, body, clean=False)


def test_a_head_is_too_long_to_come_before_its_receive():
    """Else a message that is taken back could have been seen."""

    def body(r):
        with cpu_tensors():
            if r.rank:
                head = pieces.Head()
                region = Region(ctypes.addressof(head), *[ctypes.sizeof(head)] * 2)
                work = r.cpu.cpu.post(Message("send", region, BYTES, 0, 7, 30.0, False))
                assert not work.wait(0.3)
                work.withdraw()
                assert work.done()
            r.world.barrier(2)

    run_ranks(2, body)


def test_sizes():
    for staging, piece, whole in ((65536, 16384, 16384), (64 << 20, 2 << 20, 1 << 20)):
        config = Config(cuda_staging_bytes=staging)
        assert (piece_bytes(config), whole_bytes(config)) == (piece, whole)
