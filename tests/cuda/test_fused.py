"""all_reduce by the fused kernels in a group of ranks with a GPU each, on simulated GPUs."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

from c10d_custom.transport.cuda import algorithm, fused
from c10d_custom.transport.cuda.host_exchange import Place
from conformance.reference import reduce_in_order
from conformance.values import raw, same_bytes
from device_tensors import contents, device_tensor, options, warm
from fused_ranks import P2P, gpus, run, transport_of
from test_shared import program, values
from thread_ranks import run_ranks

pytestmark = pytest.mark.lane2

HALF = 65536 // 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_collective_among_fused_ones(size, full):
    for seed in range((150 if size < 5 else 50) if full else (2 if size < 5 else 1)):
        program(5000 * size + seed, size, 10, P2P, gpus=gpus(size))


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "PREMUL_SUM"])
def test_same_bits_as_the_reference_and_by_fused_kernels_alone(op, monkeypatch):
    monkeypatch.setattr(algorithm, "one_shot_bytes", lambda ranks: 4096)
    monkeypatch.setattr(algorithm, "FLAGGED_BYTES", 1024)
    counts = [1, 1000, 1024 * 4, HALF // 2 - 1, HALF // 2, HALF // 2 + 1, 2 * HALF + 3]

    def body(r):
        algorithms = set()
        warm(r)
        r.driver.fused.launched.clear()
        for step, count in enumerate(counts):
            inputs = [values(torch.bfloat16, q, step, count) for q in range(3)]
            t = torch.empty(count, dtype=torch.bfloat16)
            r.fill(t, inputs[r.rank])
            o = options(step % 2)
            o.reduceOp = (
                torch.distributed._make_nccl_premul_sum(0.5 + r.rank) if op == "PREMUL_SUM" else getattr(ReduceOp, op)
            )
            before, agreed = len(r.driver.fused.launched), r.cpu.calls
            r.pg.allreduce([t], o).wait()
            want = reduce_in_order(inputs, op, [0.5, 1.5, 2.5])
            assert same_bytes(raw(contents(r, t)), raw(want)), count
            assert r.cpu.calls == agreed, "the hosts have met"
            assert len(r.driver.fused.launched) - before == max(1, -(-count * 2 // HALF))
            algorithms |= {key[0] for key in r.driver.fused.launched}
        assert algorithms == {"OneShot", "TwoShot", *(["Flagged"] if op != "PREMUL_SUM" else [])}
        return transport_of(r).mode.name

    assert run(3, body) == ["p2p"] * 3


def test_views_and_nothing_at_all():
    def body(r):
        wide = torch.zeros(40, 6)
        r.fill(wide, torch.full((40, 6), float(r.rank + 1)))
        column = wide[:, 2]
        r.keep.append(column)
        r.synchronize()
        r.pg.allreduce([column], options(True)).wait()
        r.pg.allreduce([device_tensor(r, 0, 1.0)], options(False))
        want = torch.full((40, 6), float(r.rank + 1))
        want[:, 2] = 3.0
        assert torch.equal(contents(r, wide), want)

    run(2, body)


@pytest.mark.parametrize("size, mode", [(1, "shared"), (2, "p2p"), (16, "p2p"), (17, "p2p")])
def test_ranks_that_the_kernels_do_not_take_go_as_before(size, mode):
    def body(r):
        t = device_tensor(r, 10, 1.0)
        r.pg.allreduce([t], options(False))
        assert contents(r, t)[0] == float(size)
        return transport_of(r).mode.name, len(r.driver.fused.launched)

    assert set(run(size, body, config={"cuda_mode": "auto"})) == {
        (mode, 4 if 2 <= size <= 16 else 0)
    }  # three in the trial


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_host_does_not_wait_and_the_result_is_awaited(asynchronous):
    def body(r):
        warm(r)
        t, gate = torch.ones(100), threading.Event()
        with r.driver.activate():
            r.driver.user(r.driver.current_stream(), lambda: t.fill_(2.0), writes=[t], ready=gate.is_set)
        work = r.pg.allreduce([t], options(asynchronous))
        work.wait()
        assert float(t[0]) == 1.0 and (not asynchronous or not work.is_completed())
        gate.set()
        assert contents(r, t)[0] == 4.0
        return work.wait(timedelta(seconds=10)) and work.is_completed() and work.get_future().wait()[0] is t

    assert run(2, body) == [True, True]


# --- memory


@pytest.mark.parametrize("step", ["zero", "open_memory", "allocate", "allocate_pinned", "export_memory"])
def test_what_one_rank_cannot_do_makes_all_fall_back(step):
    def body(r):
        if r.rank == 1:
            real, calls = getattr(r.driver, step), []
            which = {"zero": 1, "open_memory": 2, "allocate": 1, "allocate_pinned": 2, "export_memory": 1}[step]

            def fails(*arguments):
                calls.append(arguments)
                if len(calls) == which:
                    raise RuntimeError("out of luck")
                return real(*arguments)

            setattr(r.driver, step, fails)
        t = device_tensor(r, 5000, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), transport_of(r).mode

    results = run(3, body)
    assert [v for v, _ in results] == [3.0] * 3
    assert all(m.name == "shared" and "rank 1" in m.reason and "out of luck" in m.reason for _, m in results)


def test_staging_is_as_configured_or_32_mib():
    for asked, taken in ((65536, 65536), (64 << 20, 32 << 20)):
        cpu, config = SimpleNamespace(rank=0, size=2), SimpleNamespace(cuda_staging_bytes=asked)
        assert fused.Fused(Place(cpu, None, config, 0))._staging == taken


@pytest.mark.parametrize("size, blocks", [(2, 36), (4, 33)])
def test_ranks_that_share_a_gpu_where_a_test_says_so(size, blocks):
    """As many blocks as all ranks' kernels can have at once."""

    def body(r):
        warm(r)
        before = transport_of(r)._fused.p2p.launched
        t = device_tensor(r, 100_000, 1.0)
        r.pg.allreduce([t], options(False))
        end = transport_of(r)._fused.p2p
        return contents(r, t)[0].item(), transport_of(r).mode.name, end.launched > before, end._blocks

    config = {"cuda_mode": "p2p", "cuda_p2p_shared": 1}
    assert run_ranks(size, body, config=config) == [(float(size), "p2p", True, blocks)] * size


def test_a_group_is_destroyed_with_work_under_way():
    def body(r):
        warm(r)
        t = device_tensor(r, 20_000, 1.0)
        for _ in range(3):
            r.pg.allreduce([t], options(False))
        if r.rank == 1:  # the others have left, and their guards are still there
            time.sleep(0.2)
        return t

    for seed in range(5):
        assert [float(t[0]) for t in run(3, body, seed=seed, laziness=1.0)] == [27.0] * 3


def test_a_rank_that_has_left_does_not_end_the_others_calls():
    gate = threading.Event()

    def body(r):
        warm(r)
        t = device_tensor(r, 10, 1.0)
        if r.rank == 0:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        work = r.pg.allreduce([t], options(True))
        work.wait()
        if r.rank == 0:
            time.sleep(0.5)  # rank 1 is leaving: it has nothing more to do
            gate.set()
            return contents(r, t)[0].item()
        return t

    results = run(2, body)
    assert results[0] == float(results[1][0]) == 2.0
