"""Messages of a group's CUDA tensors, on a simulated GPU."""

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch

from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError
from device_tensors import contents, device_tensor
from thread_ranks import cpu_tensors, run_ranks

pytestmark = pytest.mark.lane2

MODES = ["shared", "staged"]


def both_ways(seed, size, steps, config, seconds=60.0):
    """Two ranks send large messages before either receives."""

    def body(r):
        other, n = 1 - r.rank, 40_000  # ten pieces each
        out = [device_tensor(r, n, 10.0 * r.rank + tag) for tag in range(3)]
        into, got = [device_tensor(r, n, -1.0) for _ in range(3)], []
        sends = [r.pg.send([t], other, tag) for tag, t in enumerate(out)]
        receives = [r.pg.recv([into[tag]], other, tag) for tag in (2, 0, 1)]
        for tag, w in zip((2, 0, 1), receives):
            w.wait()
            r.read(into[tag], got)
        for w in sends:
            w.wait()
        r.synchronize()
        assert [t.unique().tolist() for t in got] == [[10.0 * other + tag] for tag in (2, 0, 1)]
        assert [w.source_rank() for w in receives] == [other] * 3

    run_ranks(2, body, seed=seed, config=config, seconds=seconds)


def in_turns(seed, size, steps, config, seconds=60.0):
    """Message after message of one size, sent whole, none of which the GPU has seen when the next is posted."""

    def body(r):
        into = [torch.zeros(4000) for _ in range(6)]
        r.keep += into
        for k, t in enumerate(into):
            send = r.pg.send([device_tensor(r, 4000, 10.0 * r.rank + k)], 1 - r.rank)
            r.pg.recv([t], 1 - r.rank).wait()
            send.wait()
        assert [float(contents(r, t).unique()) for t in into] == [10.0 * (1 - r.rank) + k for k in range(6)]

    run_ranks(2, body, seed=seed, laziness=1.0, config=config, seconds=seconds)


def test_messages_in_turns():
    for seed in range(5):
        in_turns(seed, 2, 1, {"cuda_mode": "staged"})


@pytest.mark.parametrize("mode", MODES)
def test_messages_cross_in_both_directions_at_once(mode):
    for seed in range(10):
        both_ways(seed, 2, 1, {"cuda_mode": mode})


def test_messages_with_one_tag_arrive_in_order_and_from_anywhere():
    def body(r):
        if r.rank:
            works = (
                [r.pg.send([device_tensor(r, 10 + 5000 * (k % 2), float(k))], 0, 0) for k in range(6)]
                if r.rank == 1
                else []
            )
            works += [r.pg.send([device_tensor(r, 7, 99.0)], 0, 5)] if r.rank == 2 else []
            for w in works:
                w.wait()
            return None
        into = [torch.zeros(10 + 5000 * (k % 2)) for k in range(6)]
        any_one = torch.zeros(7)
        r.keep += [*into, any_one]
        works = [r.pg.recv([t], 1, 0) for t in into]
        anywhere = r.pg.recv_anysource([any_one], 5)
        for w in works:
            w.wait()
        anywhere.wait()
        assert anywhere.source_rank() == 2
        return [float(contents(r, t)[0]) for t in [*into, any_one]]

    for seed in range(6):
        assert run_ranks(3, body, seed=seed)[0] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 99.0]


def test_messages_of_different_sizes_are_told():
    def body(r):
        with pytest.raises(CollectiveMismatchError, match="bytes"):
            if r.rank:
                r.pg.send([device_tensor(r, 40_000, 1.0)], 0).wait()
            else:
                t = torch.zeros(30_000)
                r.keep.append(t)
                r.pg.recv([t], 1).wait()

    run_ranks(2, body)


def test_a_message_that_nobody_sends_times_out():
    def body(r):
        if r.rank:
            return time.sleep(1.0)
        t = torch.zeros(4)
        r.keep.append(t)
        r.pg.set_timeout(timedelta(seconds=0.3))
        with pytest.raises(CollectiveTimeoutError, match="Did rank 1 send it"):
            r.pg.recv([t], 1).wait()

    run_ranks(2, body)


def test_a_message_that_was_too_late_keeps_its_tensor_until_the_gpu_has_read_it():
    def body(r):
        if r.rank:
            return time.sleep(1.5)
        gate, t = threading.Event(), torch.ones(1000)
        gone = weakref.ref(t)
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        r.pg.set_timeout(timedelta(seconds=0.3))
        work = r.pg.send([t], 1)
        with pytest.raises(CollectiveTimeoutError, match="cuda:0 has not finished"):
            work.wait()
        del t, work
        gc.collect()  # the error has frames, which have the Work
        assert gone() is not None
        gate.set()
        until = time.monotonic() + 10
        while gone() is not None and time.monotonic() < until:
            r.synchronize()
            gc.collect()
        assert gone() is None

    run_ranks(2, body, clean=False)


def test_what_has_come_when_the_group_ends_still_goes_to_the_gpu():
    """In the thread that ends it, which is another one than moves messages otherwise."""

    def body(r):
        t = device_tensor(r, 10, 1.0)
        if r.rank == 1:
            r.pg.send([t], 0, 0).wait()
            with cpu_tensors():
                r.pg.send([torch.full((10,), 7.0)], 0, 1).wait()
            return None
        r.pg.recv([t], 1, 0).wait()
        messages = next(iter(r.pg._transport._cuda.values()))._messages
        messages._by = 1  # as if another thread were at it
        work = r.pg.recv([t], 1, 1)
        assert messages._live[-1].inner.wait(20.0)
        leave = messages.leave
        messages.leave = lambda: (leave(), setattr(messages, "_by", 0))
        r.pg.shutdown()
        assert work.is_completed() and work.exception() is None
        return t.unique().tolist()

    assert run_ranks(2, body)[0] == [7.0]
