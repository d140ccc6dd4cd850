"""Distributed checkpoints: the planner gathers and scatters objects; every rank writes its part."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from .models import Net, assert_same, batch, integer_weights, integers, squared_error
from .spawn import run

WHOLE = integers(7, 6, seed=3)


def save(rank, size, folder):
    mesh = init_device_mesh("cpu", (size,))
    state = {
        "rows": distribute_tensor(WHOLE, mesh, [Shard(0)]),
        "columns": distribute_tensor(WHOLE, mesh, [Shard(1)]),
        "everywhere": WHOLE + 1,
        "step": 17,
        "nested": {"names": ["a", "b"], "tensor": torch.arange(3)},
    }
    dcp.save(state, checkpoint_id=folder)


def load(rank, size, folder):
    """Into other placements than those saved, and on another number of ranks."""
    mesh = init_device_mesh("cpu", (size,))
    state = {
        "rows": zeros(7, 6, device_mesh=mesh, placements=[Shard(1)]),
        "columns": zeros(7, 6, device_mesh=mesh, placements=[Replicate()]),
        "everywhere": torch.zeros(7, 6),
        "step": 0,
        "nested": {"names": [], "tensor": torch.zeros(3, dtype=torch.int64)},
    }
    dcp.load(state, checkpoint_id=folder)
    assert_same(
        [state["rows"].full_tensor(), state["columns"].full_tensor(), state["everywhere"]], [WHOLE, WHOLE, WHOLE + 1]
    )
    assert state["step"] == 17 and state["nested"]["names"] == ["a", "b"]
    assert state["nested"]["tensor"].tolist() == [0, 1, 2]


def test_save_on_four_ranks_and_load_on_two(tmp_path):
    run(save, 4, str(tmp_path))
    run(load, 2, str(tmp_path))


def trained(mesh, rank, size):
    model = integer_weights(Net(width=7))
    fully_shard(model.net1, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    return model, optimizer


def one_step(model, optimizer, rank):
    optimizer.zero_grad()
    x, y = batch(rank)
    squared_error(model(x), y).backward()
    optimizer.step()


def training_goes_on(rank, size, folder):
    """A sharded model and its optimizer, saved after one step, go on elsewhere bit by bit as before."""
    mesh = init_device_mesh("cpu", (size,))
    model, optimizer = trained(mesh, rank, size)
    one_step(model, optimizer, rank)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    one_step(model, optimizer, rank)

    again, again_optimizer = trained(mesh, rank, size)
    weights, moments = get_state_dict(again, again_optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(again, again_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    one_step(again, again_optimizer, rank)
    assert_same([p.full_tensor() for p in again.parameters()], [p.full_tensor() for p in model.parameters()])

    # Gathered to rank 0, and broadcast from it.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    assert bool(weights) == (rank == 0)
    third, third_optimizer = trained(mesh, rank, size)
    # One by one: set_state_dict skips what is empty, on the ranks that have nothing.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(third, weights, options=options)
    set_optimizer_state_dict(third, third_optimizer, moments, options=options)
    assert_same([p.full_tensor() for p in third.parameters()], [p.full_tensor() for p in model.parameters()])


def test_sharded_training_goes_on_from_a_checkpoint(tmp_path):
    run(training_goes_on, 2, str(tmp_path))


def async_save(rank, size, folder):
    """The copy is taken before async_save returns: later changes are not in the checkpoint.

    The write runs in a thread of each rank, which uses a group of its own
    while the ranks go on with theirs.
    """
    group = dist.new_group()
    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])
    future = dcp.async_save({"rows": tensor}, checkpoint_id=folder, process_group=group)
    tensor.to_local().zero_()
    for i in range(20):
        value = torch.tensor([rank + i])
        dist.all_reduce(value)
        assert value.item() == sum(range(size)) + i * size
    future.result()
    back = zeros(7, 6, device_mesh=mesh, placements=[Shard(0)])
    dcp.load({"rows": back}, checkpoint_id=folder, process_group=group)
    assert_same([back.full_tensor()], [WHOLE])


def test_async_save(tmp_path):
    run(async_save, 2, str(tmp_path))
