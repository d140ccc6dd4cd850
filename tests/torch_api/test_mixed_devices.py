"""Device strings that name other backends too: each device gets the one asked for, or nobody gets anything."""

from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import c10d_custom
from c10d_custom.c10d.backend import REGISTERED
from c10d_custom.errors import UsageError
from ecosystem.spawn import run

mixes = pytest.mark.skipif(not REGISTERED, reason="torch before 2.14 keeps one backend: the error is tested below")
STRINGS = ["cpu:gloo,cuda:custom", "cpu:custom,cuda:gloo", "cuda:gloo,cpu:custom", "cuda:custom,cpu:gloo"]


def init(string, rank, size, where):
    dist.init_process_group(
        string, init_method=f"file://{where}", rank=rank, world_size=size, timeout=timedelta(seconds=20)
    )


def answers(group, string):
    asked = dict(pair.split(":") for pair in string.split(","))
    assert {d.type for d in group._device_types} == set(asked)
    for device, name in asked.items():
        assert group._get_backend(torch.device(device)).name() == name
    assert dist.get_backend_config(group) == string


def reduces(rank, size, group=None):
    for asynchronous in (False, True):
        t = torch.arange(1000.0) + rank
        work = dist.all_reduce(t, group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert torch.equal(t, size * torch.arange(1000.0) + sum(range(size)))


def mixed(rank, size, string, where):
    init(string, rank, size, where)
    answers(dist.group.WORLD, string)
    reduces(rank, size)
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    again = dist.new_group([1, 0], backend=string)
    answers(again, string)
    reduces(rank, size, again)
    ours = dist.new_group(backend="custom")  # beside it, a group that is ours alone
    reduces(rank, size, ours)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[sum(range(size)) / size] * 3]
    t = torch.full((2,), float(rank))
    dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
    assert t.tolist() == [0.0, 0.0]
    dist.destroy_process_group()


@mixes
@pytest.mark.parametrize("string", STRINGS)
def test_each_device_gets_what_was_asked_for(string, tmp_path):
    run(mixed, 2, string, str(tmp_path / "store"), init=False)


def one_backend_for_two_devices(rank, size, where):
    """In a group with a third device: one segment, not two."""
    init("cpu:custom,cuda:custom,xpu:gloo", rank, size, where)
    group = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")) is group._get_backend(torch.device("cuda"))
    reduces(rank, size)
    dist.destroy_process_group()


@mixes
def test_two_of_three_devices(tmp_path):
    run(one_backend_for_two_devices, 2, str(tmp_path / "store"), init=False)


def named(rank, size, string, devices, where):
    """All devices of the string are ours: a group of our own, for those devices."""
    init(string, rank, size, where)
    group = dist.group.WORLD
    assert type(group).__name__ == "CustomProcessGroup" and [d.type for d in group._device_types] == devices
    assert dist.get_backend_config(group) == ",".join(f"{d}:custom" for d in devices)
    reduces(rank, size)
    dist.destroy_process_group()


@pytest.mark.parametrize("string, devices", [("cpu:custom", ["cpu"]), ("cpu:custom,cuda:custom", ["cpu", "cuda"])])
def test_a_string_that_names_us_only(string, devices, tmp_path):
    run(named, 2, string, devices, str(tmp_path / "store"), init=False)


def split(rank, size, where):
    init("cpu:custom,cuda:gloo", rank, size, where)
    made = dist.split_group(None, [[1, 0]], timeout=timedelta(seconds=20))
    assert made.rank() == 1 - rank
    reduces(rank, size, made)
    dist.destroy_process_group()


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"),
    reason="torch before 2.15 splits groups of an accelerator only",
)
def test_split(tmp_path):
    run(split, 2, str(tmp_path / "store"), init=False)


@contextmanager
def gloo_under_the_name(name):
    """What torch makes when it is asked for that NCCL is gloo; it is of the type that the name has."""
    c10d = dist.distributed_c10d
    with ExitStack() as undo:
        for maker in ("_create_nccl_process_group", "_create_nccl2_process_group", "_create_nccl_lazy_process_group"):
            undo.enter_context(mock.patch.object(c10d, maker, c10d._create_gloo_process_group))
        dist.Backend._plugins.pop(name.upper(), None)
        undo.callback(dist.Backend._plugins.pop, name.upper(), None)
        yield


def beside_nccl(rank, size, name, where):
    """Of those that torch takes to be of the type custom, as ours, beside ours in gloo's place."""
    with gloo_under_the_name(name):
        if custom := name != "nccl":
            # Ours first: it refuses, and no rank's gloo goes away while another's still connects to it.
            with pytest.raises(UsageError, match="replace"):
                init(f"cpu:custom,cuda:{name}", rank, size, where + "1")
            c10d_custom.replace("gloo")
        try:
            string = f"cuda:{name},cpu:{'gloo' if custom else 'custom'}"
            init(string, rank, size, where)
            for group in (dist.group.WORLD, dist.new_group([1, 0], backend=string)):
                cpu, cuda = (group._get_backend(torch.device(d)) for d in ("cpu", "cuda"))
                assert (cpu.name(), cuda.name(), dist.get_backend_config(group)) == ("custom", "gloo", string)
                reduces(rank, size, group)
            dist.destroy_process_group()
        finally:
            c10d_custom.restore()


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_create_nccl_lazy_process_group"), reason="from torch 2.15 on there are several"
)
@pytest.mark.parametrize("name", ["nccl", "nccl-legacy", "nccl2", "nccl-lazy"])
def test_beside_each_nccl_of_torchs(name, tmp_path):
    run(beside_nccl, 2, name, str(tmp_path / "store"), init=False)


def refused(rank, size, string, where):
    """(the error, whether a later group works)"""
    with pytest.raises(UsageError) as caught:
        init(string, rank, size, where)
    if dist.is_initialized():
        dist.destroy_process_group()
    init("custom", rank, size, where + "2")
    reduces(rank, size)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.skipif(REGISTERED, reason="torch 2.14 and newer keeps both")
@pytest.mark.parametrize("string", STRINGS)
def test_an_older_torch_is_told_what_to_write(string, tmp_path):
    for error in run(refused, 2, string, str(tmp_path / "store"), init=False):
        assert (
            all(part in error for part in string.split(","))
            and "torch 2.14" in error
            and 'init_process_group("custom")' in error
        ), error


@mixes
def test_two_of_the_type_custom(tmp_path):
    for error in run(refused, 2, "cpu:custom,cuda:fake", str(tmp_path / "store"), init=False):
        assert '"fake" torch keeps one' in error, error
