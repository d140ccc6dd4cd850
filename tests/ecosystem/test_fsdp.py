"""Fully sharded data parallel, both generations, against one process."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .models import Net, assert_same, batch, grads, integer_weights, mean_gradients, squared_error
from .spawn import run


def full(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def stepped(model, size):
    """The parameters after one step of SGD, by one process."""
    gradients = mean_gradients(model, size)
    return [p.detach() - 0.5 * g for p, g in zip(model.parameters(), gradients)]


def fsdp2(rank, size, reshard):
    model = integer_weights(Net(width=7))  # 7 rows: no rank count divides them
    reference = copy.deepcopy(model)
    expected = mean_gradients(copy.deepcopy(model), size)
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model.net1, model.net2):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = batch(rank)
    output = model(x)
    assert_same([output], [reference(x)])
    squared_error(output, y).backward()
    assert_same(full(grads(model)), expected)
    optimizer.step()
    assert_same(full(model.parameters()), stepped(reference, size))
    # Accumulation without communication, then one reduce_scatter for both passes.
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters()):
            p.copy_(distribute_tensor(q.detach(), mesh, [Shard(0)]))
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    squared_error(model(x), y).backward()
    model.set_requires_gradient_sync(True)
    squared_error(model(x), y).backward()
    assert_same(full(grads(model)), [2 * e for e in expected])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(size, reshard):
    run(fsdp2, size, reshard)


def fsdp2_allocated(rank, size, kind):
    """Three steps with tensors of the backend's own in communication, and three without: the same bits."""
    mesh = init_device_mesh("cpu", (size,))

    def trained(allocated):
        torch.manual_seed(5)
        model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(2)))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "bfloat16" else MixedPrecisionPolicy()
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
            layer.set_allocate_memory_from_process_group_for_comm(allocated)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            model(torch.randn(7, 1500)).square().sum().backward()
            optimizer.step()
        return full(model.parameters())

    backend, asked = mesh.get_group()._get_backend(torch.device("cpu")), []
    plain = type(backend).allocate_tensor
    type(backend).allocate_tensor = lambda *a, **k: asked.append(a) or plain(*a, **k)
    try:
        assert_same(trained(True), trained(False))
    finally:
        type(backend).allocate_tensor = plain
    assert bool(asked) == backend.supports_tensor_alloc(torch.device("cpu"))


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"), reason="this torch never asks for it"
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_fsdp2_with_memory_of_the_group(size, kind):
    run(fsdp2_allocated, size, kind)


def fsdp2_hybrid(rank, size):
    """Sharded in pairs, replicated over the pairs: reduce_scatter in one group, all_reduce in the other."""
    model = integer_weights(Net())
    expected = mean_gradients(copy.deepcopy(model), size)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.net1, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x, y = batch(rank)
    squared_error(model(x), y).backward()
    assert_same(full(grads(model)), expected)


def test_fsdp2_hybrid_shard():
    run(fsdp2_hybrid, 4)


def fsdp2_mixed(rank, size):
    """Parameters gathered in bfloat16, gradients reduced in float32."""
    model = integer_weights(Net())
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    x, y = batch(rank)
    squared_error(model(x), y).backward()
    # Not exact: activations and gradients are rounded to bfloat16 (8 bits) between layers.
    for got, expected in zip(full(grads(model)), mean_gradients(reference, size)):
        torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03 * expected.abs().max().item())


def test_fsdp2_mixed_precision():
    run(fsdp2_mixed, 2)


def fsdp1(rank, size, strategy):
    model = integer_weights(Net(width=7))
    expected_gradients = mean_gradients(copy.deepcopy(model), size)
    expected = stepped(copy.deepcopy(model), size)
    # No sync_module_states: FSDP1 refuses it for parameters on the CPU.
    sharded = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
    )
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    x, y = batch(rank)
    squared_error(sharded(x), y).backward()
    with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
        assert_same(grads(sharded), expected_gradients)
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.FULL_STATE_DICT):
        state = sharded.state_dict()
    names = [name for name, _ in Net().named_parameters()]
    assert_same([state[name] for name in names], expected)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1(strategy):
    run(fsdp1, 2, ShardingStrategy[strategy])
