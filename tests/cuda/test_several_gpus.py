"""Ranks that have two simulated GPUs each. (Tensors of doubles are on the second: thread_ranks.py.)"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from c10d_custom.errors import CollectiveMismatchError
from conformance.reference import reduce_in_order
from conformance.values import raw, same_bytes
from device_tensors import contents, device_tensor, options
from test_staged_processes import run, torch_waits
from thread_ranks import run_ranks

pytestmark = pytest.mark.lane2

FIRST, SECOND = torch.float32, torch.float64
MODES = {
    "shared": ({"cuda_mode": "shared"}, ["GPU-0"] * 4, ["GPU-1"] * 4),
    "staged": ({"cuda_mode": "staged"}, ["GPU-0"] * 4, ["GPU-1"] * 4),
    "p2p": ({}, [f"GPU-{2 * r}" for r in range(4)], [f"GPU-{2 * r + 1}" for r in range(4)]),
}
each_mode = pytest.mark.parametrize("mode", MODES)
each_size = pytest.mark.parametrize("size", [2, 4])


def run_two(size, body, mode="shared", **more):
    config, first, second = MODES[mode]
    return run_ranks(size, body, config=config, gpus=first[:size], second_gpus=second[:size], **more)


def tensor_on(r, gpu, value=1.0, count=1000):
    t = torch.zeros(count)
    t.gpu = gpu
    r.fill(t, torch.full((count,), value))
    return t


def values(rank, step, count, dtype):
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


@each_mode
@each_size
def test_collectives_of_both_gpus_in_turn(size, mode):
    def body(r):
        seen = []
        for step in range(8):
            dtype = (FIRST, SECOND, SECOND, FIRST)[step % 4]
            count = (1, 1000, 20_000)[step % 3]
            mine = values(r.rank, step, count, dtype)
            t = torch.zeros(count, dtype=dtype)
            r.fill(t, mine)
            seen.append((step, t, r.pg.allreduce([t], options(step % 3 == 0))))
        for step, t, work in seen:
            work.wait()
            inputs = [values(q, step, len(t), t.dtype) for q in range(size)]
            assert same_bytes(raw(contents(r, t)), raw(reduce_in_order(inputs, "SUM"))), step
        return [cuda.mode.name for cuda in r.pg._transport._cuda.values()]

    for seed in range(3):
        assert run_two(size, body, mode, seed=seed) == [[mode, mode]] * size


@each_mode
def test_gpus_belong_together_by_the_order_of_first_use(mode):
    """Rank 1 begins with its second one."""

    def body(r):
        tensors = [tensor_on(r, gpu, 1.0 + k) for k, gpu in enumerate([1, 0] if r.rank else [0, 1])]
        for t in tensors:
            r.pg.allreduce([t], options(False))
        return [contents(r, t)[0].item() for t in tensors]

    assert run_two(2, body, mode) == [[2.0, 4.0]] * 2


@each_mode
@each_size
def test_gpus_in_mixed_order_are_an_error_that_says_so(size, mode):
    """The last rank's are the other way round."""

    def body(r):
        for gpu in (0, 1):
            r.pg.allreduce([tensor_on(r, gpu)], options(False))
        with pytest.raises(CollectiveMismatchError) as raised:
            work = r.pg.allreduce([tensor_on(r, int(r.rank == size - 1))], options(True))
            work.wait()
            r.synchronize()
            work.is_completed()  # of a rank that was ahead
        return str(raised.value)

    for text in run_two(size, body, mode):
        assert "they differ in device (GPU 0 in a group is the one" in text and "in the same order):" in text, text
        assert all(f"rank {rank}: all_reduce #" in text for rank in range(size)), text
        assert text.count("on CUDA (its GPU 1 in this group)") == 1, text


@pytest.mark.parametrize("busy", [0, 1])
@each_size
def test_a_barrier_is_one_for_all_gpus(size, busy):
    held = threading.Event()

    def body(r):
        for dtype in (FIRST, SECOND):
            r.pg.allreduce([device_tensor(r, 10, 1.0, dtype)], options(False))
        done, driver = [], r.drivers[busy]
        with driver.activate():
            driver.user(driver.current_stream(), lambda: done.append(busy), ready=held.is_set)
        threading.Timer(0.3, held.set).start()
        r.pg.barrier().wait()
        assert done, "the barrier has passed what was queued before it"

    run_two(size, body)


def test_a_gpu_that_another_rank_has_used_before_does_without_waiting_kernels():
    """Its ranks' kernels could wait for each other in a circle."""

    def body(r):
        for dtype in (FIRST, SECOND):
            t = device_tensor(r, 1000, 1.0, dtype)
            r.pg.allreduce([t], options(False))
            assert contents(r, t)[0].item() == 2.0
        return [cuda.mode.name for cuda in r.pg._transport._cuda.values()]

    gpus = ["GPU-0", "GPU-1"]
    assert run_ranks(2, body, gpus=gpus, second_gpus=gpus[::-1]) == [["p2p", "shared"]] * 2


def test_a_group_s_end_frees_what_it_has_on_each():
    """Though one rank comes to its end late: nothing is freed that it has open."""

    def body(r):
        for dtype in (FIRST, SECOND):
            r.pg.allreduce([device_tensor(r, 5000, 1.0, dtype)], options(False))
        if r.rank:
            time.sleep(0.3)

    for mode in ("shared", "p2p"):
        run_two(2, body, mode, laziness=1.0)


def test_works_of_both_gpus_as_one():
    """Its future comes after the calls on each."""

    def body(r):
        tensors = [device_tensor(r, 1000, 1.0, dtype) for dtype in (FIRST, SECOND)]
        r.pg._start_coalescing()
        for t in tensors:
            r.pg.allreduce([t], options(True))
        work = r.pg._end_coalescing()
        work.get_future().wait()
        work.wait()
        return [contents(r, t)[0].item() for t in tensors]

    assert run_two(2, body) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("mode", ["shared", "staged"])
def test_messages_of_either_gpu_to_either(mode):
    def body(r):
        ends = [(count, a, b) for count in (10, 400_000) for a in (0, 1) for b in (0, 1)]
        taken = [tensor_on(r, (a, b)[r.rank], 1.0 + r.rank, count) for count, a, b in ends]
        call = (r.pg.send, r.pg.recv)[r.rank]
        for work in [call([t], 1 - r.rank, tag) for tag, t in enumerate(taken)]:
            work.wait()
        return [set(contents(r, t).tolist()) for t in taken]

    assert run_two(2, body, mode) == [[{1.0}] * 8] * 2


@each_size
def test_data_parallel_threads_beside_the_group(size):
    """A rank computes on both GPUs in threads, as DataParallel does, adds up on the first, and reduces there."""

    def body(r):
        replicas, outputs = [torch.full((1000,), float(r.rank + 1), dtype=d) for d in (FIRST, SECOND)], [None, None]

        def replica(k):
            r.fill(replicas[k], replicas[k] * (k + 1))
            got = []
            r.read(replicas[k], got)
            outputs[k] = got

        for _ in range(2):
            threads = [threading.Thread(target=replica, args=(k,)) for k in (0, 1)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            r.synchronize()
            gathered = outputs[0][0] + outputs[1][0].float()
            total = torch.zeros(1000)
            r.fill(total, gathered)
            r.pg.allreduce([total], options(False))
        return contents(r, total)[0].item(), list(r.pg._transport._ordinals.values())

    # In the second round the replicas of k = 1 have doubled once more.
    assert run_two(size, body) == [(sum(5.0 * (1 + r) for r in range(size)), [0])] * size


# --- torch's modules


class ToyMpModel(nn.Module):
    """That of the tutorials, spread over two GPUs."""

    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)
        self.net2.to(SECOND)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)).to(SECOND))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator, dtype=SECOND)


STEPS = 3


def reference(size):
    """What one process makes of all ranks' batches."""
    torch.manual_seed(0)
    model = ToyMpModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / size).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(p, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(p.rank, step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    dist.barrier()
    parameters = [w.full_tensor() if isinstance(w, DTensor) else w.detach() for w in model.parameters()]
    for got, want in zip(parameters, reference(p.size), strict=True):
        torch.testing.assert_close(got, want)
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._get_default_group()._transport._ordinals.values())


def ddp_of_a_model_on_two_gpus(p):
    torch_waits(p)
    torch.manual_seed(p.rank and 7)  # DDP gives all ranks those of the first
    return train(p, DDP(ToyMpModel()))


def fsdp2_on_one_and_ddp_on_the_other(p):
    torch_waits(p)
    torch.manual_seed(0)
    model = ToyMpModel()
    fully_shard(model.net1, mesh=init_device_mesh("cpu", (p.size,)))
    model.net2 = DDP(model.net2)
    return train(p, model)


@each_size
@pytest.mark.parametrize("program", [ddp_of_a_model_on_two_gpus, fsdp2_on_one_and_ddp_on_the_other])
def test_a_model_on_two_gpus(program, size):
    assert run(size, program, gpus=2) == dict.fromkeys(range(size), [0, 1])
