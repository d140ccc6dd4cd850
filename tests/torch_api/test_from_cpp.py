"""What reaches a group from torch's C++ and not through `torch.distributed` (torch 2.14 and newer)."""

import gc
import os
import tempfile
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.c10d.backend import REGISTERED
from ecosystem.spawn import run

pytestmark = pytest.mark.skipif(not REGISTERED, reason="torch before 2.14 has no Backend for Python")
CPU = torch.device("cpu")


def raw_operators(rank, size):
    group, ops = dist.group.WORLD.boxed(), torch.ops.c10d
    total = float(sum(range(1, size + 1)))
    for asynchronous in (False, True):
        t = torch.full((5,), float(rank + 1))
        ops.barrier(t, group, [], asynchronous, -1).wait()
        output = torch.zeros(5 * size)
        _, work = ops._allgather_base_(output, t, group, asynchronous, -1)
        work.wait()
        assert output.tolist() == [float(r + 1) for r in range(size) for _ in range(5)]
        tensors, work = ops.broadcast_([t], group, size - 1, 0, asynchronous, -1)
        work.wait()
        assert tensors[0] is t and t.tolist() == [float(size)] * 5
        if hasattr(dist.ReduceOp, "boxed"):
            t = torch.full((5,), float(rank + 1))
            _, work = ops.allreduce_([t], group, dist.ReduceOp(dist.ReduceOp.SUM).boxed(), None, asynchronous, -1)
            work.wait()
            assert t.tolist() == [total] * 5
    # An error of ours comes out of C++ as what it is.
    with pytest.raises(RuntimeError, match="root rank 7"):
        ops.broadcast_([torch.ones(1)], group, 7, 0, False, -1)
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == size


def test_raw_operators():
    run(raw_operators, 2)


def recorded_by_torch(rank, size):
    """The Flight Recorder's hook is on by default since 2.15; a raw operator shows in its dump."""
    hooks = getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", None)
    if hooks is None:
        return "no hook"
    assert hooks[dist.group.WORLD] is not None
    dist.destroy_process_group()
    with tempfile.TemporaryFile() as said:  # C++ warns there
        os.dup2(said.fileno(), 2)
        dist.init_process_group("custom", store=dist.HashStore(), rank=0, world_size=1)
        said.seek(0)
        assert b"rank" not in said.read()
    return "attached" if dist.group.WORLD in hooks else "not where its rank has changed"


def test_the_flight_recorder_attaches():
    found = run(recorded_by_torch, 2)
    known = hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder")
    assert found == (["attached", "not where its rank has changed"] if known else ["no hook"] * 2)


def nan_check(rank, size, where):
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    try:
        dist.init_process_group(
            "custom", init_method=f"file://{where}", rank=rank, world_size=size, timeout=timedelta(seconds=20)
        )
    finally:
        del os.environ["TORCH_DIST_NAN_CHECK"]
    t = torch.full((3,), float(rank))
    dist.all_reduce(t)
    assert t.tolist() == [float(sum(range(size)))] * 3
    for call in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.broadcast(t, rank),
        lambda t: dist.send(t, (rank + 1) % size),
        lambda t: dist.all_gather([torch.zeros(1)] * size, t),
    ):
        with pytest.raises(RuntimeError, match="NaN"):
            call(torch.tensor([float("nan")]))
    dist.destroy_process_group()


def test_the_nan_check_sees_every_call(tmp_path):
    run(nan_check, 2, str(tmp_path / "store"), init=False)


def graph_inputs(rank, size):
    """A compiled function may be given the tensor of a collective that is under way, and waits for it."""
    from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

    torch._dynamo.reset()
    registered = torch._C._distributed_c10d._get_work_registry_size
    double = torch.compile(lambda x: torch.ops._c10d_functional.wait_tensor(x) * 2, backend="aot_eager", fullgraph=True)
    with allow_inflight_collective_as_graph_input_ctx():
        for kept in (True, False):
            for _ in range(3):
                t = torch.full((1 << 20,), float(rank + 1))
                work = dist.all_reduce(t, async_op=True)
                assert registered() == 1
                if not kept:
                    work = None  # noqa: F841 - the last reference
                    gc.collect()
                assert torch.equal(double(t), torch.full_like(t, 2.0 * sum(range(1, size + 1))))
                assert registered() == 0
        t = torch.ones(3)
        dist.all_reduce(t, async_op=True).wait()
        assert registered() == 0
        dist.all_reduce(t)
        assert registered() == 0
    assert not dist.group.WORLD._completer.held


def test_collectives_under_way_as_graph_inputs():
    run(graph_inputs, 2)


def let_go(rank, size):
    """A group that is destroyed is freed, with its backend: neither holds the other through C++."""
    seen = []
    for _ in range(3):
        group = dist.new_group(list(range(size)))
        seen += [weakref.ref(group), weakref.ref(group._get_backend(CPU))]
        torch.ops.c10d.barrier(torch.zeros(1), group.boxed(), [], False, -1)
        dist.destroy_process_group(group)
        del group
    gc.collect()
    return [ref() is None for ref in seen]


def test_a_destroyed_group_is_freed():
    for freed in run(let_go, 2):
        assert all(freed), freed


def every_kind_of_hook(rank, size):
    """Hooks made by Python are called for each call of the group, in whichever form."""
    group, seen = dist.new_group(list(range(size))), []
    group.register_pre_hook(1, lambda args: seen.append(args.name.name))
    t = torch.ones(2 * size)
    dist.all_reduce(t, group=group)
    dist.broadcast(t, 0, group=group)
    dist.all_to_all_single(torch.empty_like(t), t, group=group)
    dist.all_gather_object([None] * size, rank, group=group)
    dist.barrier(group=group)
    dist.isend(t, 1, group=group).wait() if rank == 0 else dist.recv(t, 0, group=group)
    group.unregister_pre_hook(1)
    dist.destroy_process_group(group)
    return seen


def test_hooks():
    first, second = run(every_kind_of_hook, 2)
    assert first[-1] == "SEND" and second[-1] == "RECV" and first[:-1] == second[:-1]
    assert len(first) >= 6 and first[0] == "ALLREDUCE" and first[1] == "BROADCAST", first
