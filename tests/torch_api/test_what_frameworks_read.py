"""Names and properties that libraries read off a group, and what becomes of them."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ecosystem.spawn import backend, run


def names(rank, size):
    group = dist.group.WORLD
    device = torch.device("cpu")
    assert dist.get_backend() == group.name() == group.getBackendName() == group._get_backend(device).name() == "custom"
    assert [f"{d.type}:custom" for d in group._device_types] == dist.get_backend_config().split(",")
    assert list(dist.Backend.backend_capability["custom"]) == [d.type for d in group._device_types]
    # torch's own group answers "custom" here for any backend that torch does not know; torchrec takes that for a fake
    # one.
    assert group._get_backend_name() == "c10d_custom"
    for name in ("supports_splitting", "supports_coalescing", "supports_time_estimate", "supports_shrinking"):
        assert isinstance(getattr(group._get_backend(device), name), bool)


def test_they_agree():
    run(names, 2)


def sharded_gather(rank, size):
    """It asks which device this backend is for: one that is not there must not be named."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(size)])
    made = sharded_tensor.empty(spec, 2 * size, 3)
    made.local_tensor().fill_(rank + 1.0)
    whole = torch.zeros(2 * size, 3) if rank == 0 else None
    made.gather(0, whole)
    if rank == 0:
        assert whole.tolist() == [[r + 1.0] * 3 for r in range(size) for _ in range(2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_sharded_tensor_gather():
    run(sharded_gather, 2)


def allocated_by_the_group(rank, size):
    """FSDP2 asks the backend whether tensors come from it."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    fully_shard(model)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model(torch.ones(2, 4)).sum().backward()
    return [p.grad.full_tensor().tolist() for p in model.parameters()]


def in_one_process():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model(torch.ones(2, 4)).sum().backward()
    return [p.grad.tolist() for p in model.parameters()]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"), reason="this torch's FSDP2 does not ask"
)
def test_fsdp2_allocates_its_own():
    for grads in run(allocated_by_the_group, 2):
        assert grads == in_one_process()


def variable_batches(rank, size):
    """Rank r has r + 2 examples of a feature on each rank; with synchronous collectives, forward and backward."""
    from torchrec.distributed import comm_ops

    batch = [2 + r for r in range(size)]
    group = dist.group.WORLD
    with comm_ops.torchrec_use_sync_collectives():
        torch.manual_seed(rank)
        sent = torch.randn(sum(batch) * 4, requires_grad=True)
        got = comm_ops.variable_batch_alltoall_pooled(
            sent,
            batch_size_per_rank_per_feature=[[b] for b in batch],
            batch_size_per_feature_pre_a2a=[batch[rank]] * size,
            emb_dim_per_rank_per_feature=[[4]] * size,
            group=group,
        ).wait()
        (got * torch.arange(1.0, got.numel() + 1)).sum().backward()
    return got.tolist(), sent.grad.tolist()


def test_torchrec_communicates(monkeypatch):
    pytest.importorskip(
        "torchrec", reason="scripts/compat installs it beside torch 2.13, for which its kernels were built"
    )
    ours = run(variable_batches, 2)
    monkeypatch.setenv("C10D_TEST_BACKEND", "gloo")
    assert backend() == "gloo"
    assert run(variable_batches, 2) == ours


TORCHCOMMS = """
import sys, types
# What torch looks for of torchcomms. A backend that it does not know is none of its business.
comms, inner, hooks = (types.ModuleType(n) for n in ("torchcomms", "torchcomms._comms", "torchcomms.hooks"))
comms.__path__ = []
inner._BackendWrapper, inner._is_backend_registered, inner.new_comm = object, lambda name: False, None
comms.is_backend_built, comms.new_comm = lambda name: name in ("gloo", "nccl"), None
hooks.FlightRecorderHook = object
sys.modules.update({"torchcomms": comms, "torchcomms._comms": inner, "torchcomms.hooks": hooks})
import torch, torch.distributed as dist
c10d = dist.distributed_c10d
print(getattr(c10d, "_use_torchcomms_enabled", lambda: None)())
dist.init_process_group("custom", store=dist.HashStore(), rank=0, world_size=1)
t = torch.arange(3.0)
dist.all_reduce(t)
print(type(dist.group.WORLD).__name__, dist.get_backend(), t.tolist())
dist.all_reduce(t, group=dist.new_group([0]))
dist.destroy_process_group()
"""


def test_with_torchcomms_switched_on():
    """The wheel of torchcomms on PyPI is empty (0.0.1): its presence is simulated."""
    done = subprocess.run(
        [sys.executable, "-c", TORCHCOMMS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"},
    )
    c10d = dist.distributed_c10d
    if hasattr(c10d, "_use_torchcomms_enabled") and not hasattr(c10d, "_torchcomms_handles_backend"):
        assert 'init_process_group("custom") will fail: TORCH_DISTRIBUTED_USE_TORCHCOMMS is set' in done.stderr
        return
    assert done.stdout.splitlines() == [
        f"{hasattr(c10d, '_use_torchcomms_enabled') or None}",
        "CustomProcessGroup custom [0.0, 1.0, 2.0]",
    ], done.stderr
