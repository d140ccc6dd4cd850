"""What docs/cuda.md says of many streams, several groups on one GPU, torch's expandable segments, MPS and MIG, on a
simulated GPU. (CUDA graphs: test_fused_graphs.py, and test_a_capture_is_refused of test_device_work.py.)"""

import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore

from c10d_custom.c10d.issuing import NewGroup
from c10d_custom.c10d.process_group import CustomProcessGroup
from c10d_custom.config import Config
from c10d_custom.creation.exchange import Exchange
from c10d_custom.creation.local_datagrams import letters_of
from c10d_custom.errors import CustomBackendError
from c10d_custom.transport.by_device import ByDevice
from c10d_custom.transport.cuda import transport as cuda_transport
from c10d_custom.transport.shm import ShmTransport
from device_tensors import contents, device_tensor, options, warm
from fake_driver import FakeDriver
from fake_world import World
from thread_ranks import SMALL, Met, run_ranks

pytestmark = pytest.mark.lane2

MODES = {"shared": {"cuda_mode": "shared"}, "staged": {"cuda_mode": "staged"}, "p2p": {"cuda_mode": "p2p"}}
each_mode = pytest.mark.parametrize("mode", MODES)


def gpus(mode, size):
    return [f"GPU-{r}" for r in range(size)] if mode == "p2p" else None


@each_mode
def test_many_streams(mode):
    """Calls from 40 streams of the user's: each comes after its own stream, and they run in the order of issue."""

    def body(r):
        warm(r)
        with r.driver.activate():
            streams = [r.driver.create_stream() for _ in range(40)]
        total, works, seen = torch.zeros(100), [], []
        r.keep.append(total)
        for k, stream in enumerate(streams):
            with r.driver.on(stream):
                t = device_tensor(r, 100, float(k))
                works.append((stream, t, r.pg.allreduce([t], options(True))))
        for k, (stream, t, work) in enumerate(works):
            with r.driver.on(stream):
                work.wait()
                seen.append(contents(r, t).unique().tolist() == [2.0 * k])
        with r.driver.activate():
            for stream in streams:
                r.driver.destroy_stream(stream)
        return all(seen)

    assert run_ranks(2, body, seed=4, config=MODES[mode], gpus=gpus(mode, 2)) == [True, True]


def another_group(r, config):
    """A second group of the same ranks."""
    store = PrefixStore("another", r.pg._store)
    made = Config(**{**SMALL, **config})
    with letters_of(Exchange(PrefixStore("its", store), r.rank, r.size, 30.0)) as letters:
        cpu = Met(ShmTransport(letters, made, "another", list(range(r.size))), r.world, "another")
    transport = ByDevice(cpu, made, one_host=True)
    new = NewGroup(store, r.rank, r.size, timedelta(seconds=60), "another")
    return CustomProcessGroup(transport, store, new)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "p2p"])
def test_two_groups_on_one_gpu_in_any_order(mode):
    """No kernel waits in these modes, so ranks may issue calls of different groups in different orders."""

    def body(r):
        warm(r)
        second = another_group(r, MODES[mode])
        a, b = device_tensor(r, 20_000, 1.0), device_tensor(r, 300, 2.0)
        for _ in range(3):
            pair = [(r.pg, a), (second, b)]
            for work in [group.allreduce([t], options(True)) for group, t in (pair if r.rank else pair[::-1])]:
                work.wait()
        result = contents(r, a).unique().tolist(), contents(r, b).unique().tolist()
        second.shutdown()
        return result

    for seed in range(3):
        assert run_ranks(2, body, seed=seed, config=MODES[mode], clean=False) == [([8.0], [16.0])] * 2


@each_mode
def test_no_memory_of_torch_is_exported(mode):
    """Which torch's expandable segments would make impossible: what ranks open is what the driver has allocated."""
    exported, allocated = [], []

    class Watched(FakeDriver):
        def allocate(self, nbytes):
            allocated.append(super().allocate(nbytes))
            return allocated[-1]

        def export_memory(self, address):
            exported.append(address)
            return super().export_memory(address)

    def body(r):
        t = device_tensor(r, 30_000, 1.0)
        r.pg.allreduce([t], options(False))
        r.pg.broadcast([t]).wait()
        return contents(r, t)[0].item()

    world = World(2)
    drivers = [Watched(world, r, f"GPU-{r}" if mode == "p2p" else "GPU-0") for r in range(2)]
    assert run_ranks(2, body, config=MODES[mode], world=world, drivers=drivers) == [2.0, 2.0]
    assert set(exported) <= set(allocated) and bool(exported) == (mode != "staged")


@each_mode
def test_a_death_under_mps_takes_the_gpu_along_and_nobody_hangs(mode, monkeypatch):
    monkeypatch.setattr(cuda_transport, "_DRAIN", 0.5)
    world = World(6)
    world.shares_context = True

    def body(r):
        warm(r)
        if r.rank == 1:
            time.sleep(0.2)
            world.kill(1)
            r.cpu.cpu.abort()
            r.cpu.cpu.set_mark(1)
            r.pg._closed = True
            return None
        began = time.monotonic()
        with pytest.raises((CustomBackendError, RuntimeError), match="MPS_CLIENT_TERMINATED|no more use|abort"):
            while time.monotonic() < began + 20:
                r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False, 10.0))
        return time.monotonic() - began

    drivers = [FakeDriver(world, r) for r in range(3)]
    config = {"cuda_mode": "shared"} if mode == "p2p" else MODES[mode]
    times = run_ranks(3, body, config=config, world=world, drivers=drivers, clean=False, may_race=True)
    assert all(t is None or t < 5 for t in times), times


@pytest.mark.parametrize("names", [["MIG-a", "MIG-b"], ["MIG-a", "MIG-a", "MIG-b"]])
def test_instances_of_mig_that_cannot_open_each_others_memory_go_by_the_host(names):
    world = World(8)
    world.separate = True

    def body(r):
        t = device_tensor(r, 30_000, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), next(iter(r.pg._transport._cuda.values())).mode

    drivers = [FakeDriver(world, r, name) for r, name in enumerate(names)]
    results = run_ranks(len(names), body, world=world, drivers=drivers)
    assert [value for value, _ in results] == [float(len(names))] * len(names)
    assert {mode.name for _, mode in results} == {"staged"}
    assert all("another GPU instance" in mode.reason for _, mode in results)


def test_ranks_on_one_instance_of_mig_share_it():
    world = World(8)
    world.separate = True

    def body(r):
        warm(r)
        return next(iter(r.pg._transport._cuda.values())).mode.name

    assert run_ranks(2, body, world=world, drivers=[FakeDriver(world, r, "MIG-a") for r in range(2)]) == ["shared"] * 2
