"""What a program of NCCL's may ask of a group besides: to be ready from the start, barriers of a device, times of
calls, streams that come first. On a simulated GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.distributed_c10d import BarrierOptions

from c10d_custom.c10d import backend, registration
from c10d_custom.errors import UsageError
from device_tensors import device_tensor, options
from thread_ranks import run_ranks

GPU = torch.device("cuda", 0)
MODES = {
    "shared": ({"cuda_mode": "shared"}, None),
    "staged": ({"cuda_mode": "staged"}, None),
    "p2p": ({"cuda_mode": "p2p"}, ["GPU-0", "GPU-1"]),
}


def cuda_of(r):
    return next(iter(r.pg._transport._cuda.values()), None)


@pytest.mark.parametrize("mode", MODES)
def test_the_default_group_is_ready_where_init_names_a_device(mode):
    def body(r):
        r.pg._backend.eager_connect_single_device(torch.device("cpu"))
        assert cuda_of(r) is None
        r.pg._backend.eager_connect_single_device(GPU)
        assert cuda_of(r).mode.name == mode
        met = r.cpu.calls
        t = device_tensor(r, 100, 1.0)
        r.pg.allreduce([t], options(False))
        r.synchronize()
        return r.cpu.calls - met, t.unique().tolist()

    config, gpus = MODES[mode]
    meetings = 0 if mode == "p2p" else 1  # for the call alone
    assert run_ranks(2, body, config=config, gpus=gpus) == [(meetings, [2.0])] * 2


def test_further_groups_are_made_ready_when_used(monkeypatch):
    class Group:
        WORLD = object()

    def body(r):
        monkeypatch.setattr(backend.dist, "group", Group)
        r.pg._backend.eager_connect_single_device(GPU)
        monkeypatch.undo()
        return cuda_of(r)

    assert run_ranks(1, body) == [None]


def test_ranks_of_which_one_cannot_be_made_ready_all_hear_of_it():
    def body(r):
        if r.rank:
            r.pg._transport.device_types = ["cpu"]
        with pytest.raises(UsageError if r.rank else Exception, match="made for cpu" if r.rank else "rejected|refused"):
            r.pg._backend.eager_connect_single_device(GPU)

    run_ranks(2, body, clean=False)


def test_a_barrier_of_a_device_waits_for_its_work(monkeypatch):
    """Of one that the group has not had tensors on."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    ran = []

    def body(r, ids):
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: ran.append(r.rank))
        o = BarrierOptions()
        o.asyncOp = False
        o.device_ids = ids
        r.pg.barrier(o)
        return len(ran), cuda_of(r) is not None

    assert run_ranks(2, lambda r: body(r, [0, 1]), laziness=1.0) == [(2, True)] * 2
    ran.clear()
    assert run_ranks(2, lambda r: body(r, []), laziness=1.0) == [(0, False)] * 2


@pytest.mark.parametrize("mode", ["shared", "staged"])
def test_calls_are_timed_from_when_it_is_wanted(mode):
    def body(r):
        t = device_tensor(r, 20000, 1.0)
        work = r.pg.allreduce([t], options(True))
        work.wait()
        r.synchronize()
        with pytest.raises(UsageError, match="_enable_collectives_timing"):
            work._get_duration()
        r.pg._enable_collectives_timing()
        work = r.pg.allreduce([t], options(True))
        other = r.pg.send([device_tensor(r, 20000, 1.0)], 1 - r.rank)
        r.pg.recv([device_tensor(r, 20000, 0.0)], 1 - r.rank).wait()
        for w in (work, other):
            w.wait()
            r.synchronize()
        took, copied = work._get_duration(), 1e3 * 80000 / r.world.rates["link"]
        assert took >= copied and other._get_duration() >= copied
        return t.unique().tolist()

    assert run_ranks(2, body, config={"cuda_mode": mode}) == [[4.0]] * 2


def test_a_call_that_is_under_way_has_no_duration():
    def body(r):
        r.pg._enable_collectives_timing()
        over, t = [], device_tensor(r, 10, 1.0)
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: None, ready=lambda: bool(over))
        work = r.pg.send([t], 0)
        with pytest.raises(UsageError, match="not done"):
            work._get_duration()
        over.append(1)
        r.pg.recv([t], 0).wait()
        work.wait()

    run_ranks(1, body)


@pytest.mark.parametrize("first", [False, True])
def test_streams_come_first_where_that_is_asked_for(first):
    wanted = SimpleNamespace(is_high_priority_stream=first)
    given = SimpleNamespace(
        store=None, group_rank=0, group_size=1, timeout=None, group_id="", global_ranks_in_group=[0]
    )
    new = registration._new_group(given, {}, False, wanted)
    assert new.first is first and registration._new_group(given, {}, False).first is False

    def body(r):
        r.pg._transport.first = new.first
        r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False))
        works = [r.pg.send([device_tensor(r, 10, 1.0)], r.rank), r.pg.recv([device_tensor(r, 10, 1.0)], r.rank)]
        for work in works:
            work.wait()
        return r.driver.highest

    assert run_ranks(1, body) == [[first] * 3]
