"""CUDA tensors in staged mode, end to end: real processes, init_process_group("custom"), real shared memory. Only
the GPU is simulated, one in each process."""

import contextlib
import multiprocessing
import os
import re
import signal
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import UsageError
from c10d_custom.transport.cuda.stream_op import StreamOp
from conformance.reference import reduce_in_order
from conformance.values import raw, same_bytes
from thread_ranks import cpu_tensors

pytestmark = pytest.mark.lane2

SECONDS = 60


def _rank(rank, size, port, scenario, gpus, answers):
    from c10d_custom import config
    from c10d_custom.c10d import meeting as creation
    from fake_driver import FakeDriver
    from fake_world import World
    from thread_ranks import standing_in

    world = World(seed=rank, laziness=0.9)
    drivers = [FakeDriver(world, 0, gpu=f"GPU-{rank}", process=os.getpid())]
    drivers += [FakeDriver(world, k, gpu=f"GPU-{rank}-{k}", first=drivers[0]) for k in range(1, gpus)]
    creation.configuration.cache_clear()
    try:
        os.environ["C10D_CUSTOM_CUDA_MODE"] = "staged"
        os.environ["C10D_CUSTOM_CUDA_STAGING_BYTES"] = str(1 << 18)
        assert config.Config.from_env().cuda_mode == "staged"
        with standing_in(lambda device: drivers[device.index], gpus == 2):
            dist.init_process_group(
                "custom",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=SECONDS),
            )
            answer = scenario(Place(rank, size, drivers, world))
            dist.destroy_process_group()
        world.settle()
        answers.put((rank, answer, _real(world.violations), world.leaks() if scenario in CLEAN else []))
    except BaseException:
        answers.put((rank, None, [traceback.format_exc()], []))


def _real(violations):
    """Without races between a process's GPUs: its tensors lie in malloc's memory here, which gives the one what was the
    other's, as CUDA's never does."""
    between = re.compile(r"race: .* of rank (\d+) \w+ what .* of rank (?!\1\b)\d+ \w+")
    return [violation for violation in violations if not between.fullmatch(violation)]


class Place:
    def __init__(self, rank, size, drivers, world):
        self.rank, self.size, self.drivers, self.world = rank, size, drivers, world
        self.driver = drivers[0]

    def fill(self, tensor, values):
        self.world.keep += [tensor, values]
        with self.driver.activate():
            self.driver.user(self.driver.current_stream(), lambda: tensor.copy_(values), writes=[tensor])
        return tensor

    def seen(self, tensor):
        got = []
        with self.driver.activate():
            self.driver.user(self.driver.current_stream(), lambda: got.append(tensor.clone()), reads=[tensor])
        self.world.settle()
        return got[0]


def _port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(size, scenario, missing=(), gpus=1):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    answers, port = context.Queue(), _port()
    ranks = [context.Process(target=_rank, args=(r, size, port, scenario, gpus, answers)) for r in range(size)]
    for p in ranks:
        p.start()
    try:
        said = {}
        for _ in range(size - len(missing)):
            rank, answer, violations, leaks = answers.get(timeout=SECONDS + 60)
            assert not violations, f"rank {rank}: {violations[0]}\n{violations[1:3]}"
            assert not leaks, f"rank {rank}: {leaks}"
            said[rank] = answer
        return said
    finally:
        for p in ranks:
            p.join(20)
            if p.is_alive():
                p.kill()


def inputs(rank, count, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives(p):
    for dtype in (torch.float32, torch.bfloat16):
        for count in (0, 1, 1000, 300_001):
            t = p.fill(torch.zeros(count, dtype=dtype), inputs(p.rank, count, dtype))
            dist.all_reduce(t)
            want = reduce_in_order([inputs(r, count, dtype) for r in range(p.size)], "SUM")
            assert same_bytes(raw(p.seen(t)), raw(want)), (dtype, count)

            t = p.fill(torch.zeros(count, dtype=dtype), inputs(p.rank, count, dtype))
            out = p.fill(torch.zeros(count * p.size, dtype=dtype), torch.zeros(count * p.size, dtype=dtype))
            work = dist.all_gather_into_tensor(out, t, async_op=True)
            work.wait()
            assert same_bytes(raw(p.seen(out)), raw(torch.cat([inputs(r, count, dtype) for r in range(p.size)])))

    splits = [[7 * (a + 2 * b) for b in range(p.size)] for a in range(p.size)]
    mine = p.fill(torch.zeros(sum(splits[p.rank])), torch.full((sum(splits[p.rank]),), float(p.rank)))
    sizes = [splits[r][p.rank] for r in range(p.size)]
    out = p.fill(torch.zeros(sum(sizes)), torch.full((sum(sizes),), -1.0))
    dist.all_to_all_single(out, mine, sizes, splits[p.rank])
    assert torch.equal(p.seen(out), torch.cat([torch.full((n,), float(r)) for r, n in enumerate(sizes)]))
    with cpu_tensors():
        objects = [None] * p.size
        dist.all_gather_object(objects, {"rank": p.rank})
        assert objects == [{"rank": r} for r in range(p.size)]
    dist.barrier()
    return "right"


def large_messages_both_ways(p):
    """Both send 8 MB before either receives."""
    other, n = 1 - p.rank, 2_000_000
    out = p.fill(torch.zeros(n), torch.full((n,), float(p.rank + 1)))
    into = p.fill(torch.zeros(n), torch.zeros(n))
    works = [dist.isend(out, other), dist.irecv(into, other)]
    for w in works:
        w.wait()
    assert torch.equal(p.seen(into), torch.full((n,), float(other + 1)))

    again = [p.fill(torch.zeros(50), torch.full((50,), float(k))) for k in range(4)]
    got = [p.fill(torch.zeros(50), torch.zeros(50)) for _ in range(4)]
    batch = [
        op
        for k in range(4)
        for op in (dist.P2POp(dist.isend, again[k], other, tag=k), dist.P2POp(dist.irecv, got[3 - k], other, tag=3 - k))
    ]
    for w in dist.batch_isend_irecv(batch):
        w.wait()
    assert [float(p.seen(t)[0]) for t in got] == [0.0, 1.0, 2.0, 3.0]
    return "right"


def torch_waits(p):
    """Every stream is done before torch goes on."""
    # Its kernels are torch's on the CPU, which do not wait for a simulated stream: the stream must be done first.
    join = StreamOp.join

    def joined(stream_op):
        join(stream_op)
        p.world.settle()

    @contextlib.contextmanager
    def after(events):
        p.world.settle()
        yield

    StreamOp.join = joined
    for driver in p.drivers:
        driver.after = after


def ddp(p):
    torch_waits(p)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + p.rank))
        parallel(x).square().mean().backward()
        optimizer.step()
    return [float(w.sum()) for w in parallel.parameters()]


def killed(p):
    t = p.fill(torch.zeros(100_000), torch.ones(100_000))
    dist.all_reduce(t)
    if p.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(100):
            dist.all_reduce(t)
    except dist.DistBackendError as error:
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    return None


def killed_while_sending(p):
    if p.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    t = p.fill(torch.zeros(4_000_000), torch.ones(4_000_000))
    began = time.monotonic()
    try:
        dist.isend(t, 1).wait()
    except dist.DistBackendError as error:
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    return None


def late(p):
    t = p.fill(torch.zeros(10), torch.ones(10))
    dist.all_reduce(t)
    if p.rank == 1:
        time.sleep(2)
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    try:
        dist.all_reduce(t)
    except dist.DistBackendError as error:
        return f"{type(error).__name__}: {error}"
    return None


def handler_amid_the_first_call(p):
    """It calls the group, whose part for this device is only being made: an error, and the first call goes on."""
    create, refused = p.driver.create_stream, []

    def interrupted():
        p.driver.create_stream = create
        signal.raise_signal(signal.SIGALRM)
        return create()

    def handler(*_):
        try:
            dist.all_reduce(p.fill(torch.zeros(3), torch.ones(3)))
        except UsageError as error:
            refused.append(str(error))

    signal.signal(signal.SIGALRM, handler)
    p.driver.create_stream = interrupted
    t = p.fill(torch.zeros(3), torch.ones(3))
    dist.all_reduce(t)
    assert len(refused) == 1 and "amid its first call" in refused[0], refused
    assert p.seen(t).tolist() == [float(p.size)] * 3
    return "right"


CLEAN = (collectives, large_messages_both_ways, handler_amid_the_first_call)


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size):
    assert run(size, collectives) == dict.fromkeys(range(size), "right")


def test_large_messages_both_ways():
    assert run(2, large_messages_both_ways) == {0: "right", 1: "right"}


def test_a_handler_amid_the_first_call():
    assert run(2, handler_amid_the_first_call) == {0: "right", 1: "right"}


def test_ddp_takes_the_same_steps_everywhere():
    said = run(2, ddp)
    assert said[0] == said[1]


def test_a_killed_rank_is_named_at_once():
    seconds, text = run(3, killed, missing=[1])[0]
    assert seconds < 2 and "PeerLostError" in text and "rank 1" in text, (seconds, text)


def test_a_killed_receiver_is_named_at_once():
    seconds, text = run(2, killed_while_sending, missing=[1])[0]
    assert seconds < 5 and "PeerLostError" in text and "rank 1" in text, (seconds, text)


def test_a_late_rank_is_named():
    said = run(2, late)
    assert "CollectiveTimeoutError" in said[0] and "Missing: rank 1" in said[0], said
