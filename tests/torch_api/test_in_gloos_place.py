"""C10D_CUSTOM_REPLACES=gloo and c10d_custom.replace: who says "gloo" gets this backend, and its name."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import c10d_custom
from c10d_custom.c10d.backend import REGISTERED, CustomBackend
from c10d_custom.c10d.process_group import CustomProcessGroup
from c10d_custom.errors import UsageError
from ecosystem.spawn import run

mixes = pytest.mark.skipif(not REGISTERED, reason="torch before 2.14 keeps one backend: tested below")
WAYS = ["gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo", None]


def init(backend, rank, size, where):
    dist.init_process_group(
        backend, init_method=f"file://{where}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )


def is_ours(group):
    return isinstance(group, CustomProcessGroup)


def reduces(rank, size, group=None):
    t = torch.arange(5, dtype=torch.int16) + rank  # a dtype that gloo cannot reduce
    dist.all_reduce(t, group=group)
    assert t.tolist() == [size * i + sum(range(size)) for i in range(5)]


def asked_for(rank, size, backend, where):
    c10d_custom.replace("gloo")
    c10d_custom.replace()
    init(backend, rank, size, where)
    world = dist.group.WORLD
    assert is_ours(world) and world.getBackendName() == "custom" and dist.is_gloo_available()
    if backend is not None:
        assert dist.get_backend() == backend.lower().split(",")[0].removeprefix("cpu:") or dist.get_backend() == backend
    reduces(rank, size)
    if backend == "gloo":
        assert dist.get_backend() == "gloo" == dist.Backend.GLOO
        dist.monitored_barrier()
    for name in ("gloo", "cpu:gloo", None):
        again = dist.new_group([1, 0], backend=name)
        assert is_ours(again), name
        reduces(rank, size, again)
    mesh = dist.init_device_mesh("cpu", (size,))
    assert is_ours(mesh.get_group())
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[sum(range(size)) / size] * 3]
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    theirs = dist.ProcessGroupGloo(dist.PrefixStore("by hand", world._store), rank, size, timedelta(seconds=20))
    assert theirs.name() == "gloo"
    t = torch.ones(3)
    theirs.allreduce([t]).wait()
    assert t.tolist() == [size] * 3
    c10d_custom.restore()
    gloo = dist.new_group(backend="gloo")
    assert not is_ours(gloo) and gloo.name() == "gloo" and dist.get_backend(gloo) == "gloo"
    reduces(rank, size)  # the groups that are there stay
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", WAYS)
def test_every_way_to_ask_for_gloo(backend, tmp_path):
    run(asked_for, 2, backend, str(tmp_path / "store"), init=False)


def beside_another(rank, size, where):
    """As "cpu:gloo,cuda:nccl" on a machine with GPUs: the other device's backend is kept."""
    c10d_custom.replace("gloo")
    init("cpu:gloo,cuda:fake", rank, size, where)
    world = dist.group.WORLD
    cpu, cuda = (world._get_backend(torch.device(d)) for d in ("cpu", "cuda"))
    assert isinstance(cpu, CustomBackend) and cpu.name() == "custom" and not isinstance(cuda, CustomBackend)
    reduces(rank, size)
    dist.destroy_process_group()
    c10d_custom.restore()  # the process runs other tests after this one


@mixes
def test_the_other_backend_of_a_mixed_string_is_kept(tmp_path):
    run(beside_another, 2, str(tmp_path / "store"), init=False)


def kept_as_they_are(rank, size, where):
    c10d_custom.replace("gloo")
    init("cpu:gloo,xpu:fake", rank, size, where)
    assert not is_ours(dist.group.WORLD)
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t.tolist() == [size] * 3
    dist.destroy_process_group()
    c10d_custom.restore()


@pytest.mark.skipif(REGISTERED, reason="from torch 2.14 on each device gets its own: tested above")
def test_an_older_torch_keeps_a_mixed_string_as_it_is(tmp_path):
    run(kept_as_they_are, 2, str(tmp_path / "store"), init=False)


def test_only_gloo_can_be_replaced():
    with pytest.raises(UsageError, match="only gloo can be replaced"):
        c10d_custom.replace("nccl")


CHILD = """
import json, sys, logging
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
import torch, torch.distributed as dist
table = {k: v for k, v in dist.Backend._plugins.items() if k in ("GLOO", "NCCL")}
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
print(json.dumps([type(dist.group.WORLD).__name__, dist.get_backend(), dist.group.WORLD.name(), sorted(table)]))
dist.new_group(backend="gloo")
dist.destroy_process_group()
"""


def child(tmp_path, **env):
    environment = {k: v for k, v in os.environ.items() if k != "C10D_CUSTOM_REPLACES"}
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "store")],
        env={**environment, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_variable_alone(tmp_path):
    done = child(tmp_path, C10D_CUSTOM_REPLACES="gloo")
    assert json.loads(done.stdout)[:2] == ["CustomProcessGroup", "gloo"], done.stderr
    assert done.stderr.count('are made by "custom"') == 1


def test_nothing_changes_without_it(tmp_path):
    done = child(tmp_path)
    kind, asked, name, table = json.loads(done.stdout)
    assert (kind, asked, name) == ("ProcessGroup", "gloo", "gloo") and not table, done.stderr
    assert "custom" not in done.stderr


def test_a_value_that_it_cannot_have(tmp_path):
    done = child(tmp_path, C10D_CUSTOM_REPLACES="nccl")
    assert json.loads(done.stdout)[0] == "ProcessGroup"  # gloo's: only a group of ours reads the settings
