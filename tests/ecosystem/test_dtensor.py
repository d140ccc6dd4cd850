"""DTensor, device meshes and tensor parallelism."""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    ones,
    zeros,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .models import Net, assert_same, batch, grads, integer_weights, integers, squared_error
from .spawn import run


def redistribution(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = integers(5, 6, seed=1)  # 5 rows: the shards differ in size
    if rank != 0:
        whole_here = torch.zeros_like(whole)  # only rank 0's values count
    else:
        whole_here = whole
    for start in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(whole_here, mesh, [start])
        for end in (Shard(0), Shard(1), Replicate()):
            moved = tensor.redistribute(mesh, [end])
            assert moved.placements == (end,)
            assert_same([moved.full_tensor()], [whole])
            if end.is_shard():
                chunks = whole.chunk(size, end.dim)
                mine = chunks[rank] if rank < len(chunks) else whole.narrow(end.dim, 0, 0)
                assert_same([moved.to_local()], [mine])
    # Pending sums: reduced on the way to a full or a sharded tensor.
    for op, expected in (
        ("sum", whole * sum(range(1, size + 1))),
        ("max", (whole * size).maximum(whole)),
        ("min", (whole * size).minimum(whole)),
    ):
        partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial(op)])
        assert_same([partial.redistribute(mesh, [Replicate()]).to_local()], [expected])
        assert_same([partial.redistribute(mesh, [Shard(0)]).full_tensor()], [expected])
        assert_same([partial.redistribute(mesh, [Shard(1)]).full_tensor()], [expected])


def test_redistribution():
    run(redistribution, 2)


def test_redistribution_on_four_ranks():
    run(redistribution, 4)


def operations(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    a, b = integers(6, 8, seed=1), integers(8, 4, seed=2)
    for place_a in (Shard(0), Shard(1), Replicate()):
        for place_b in (Shard(0), Shard(1), Replicate()):
            da = distribute_tensor(a, mesh, [place_a]).requires_grad_()
            db = distribute_tensor(b, mesh, [place_b])
            product = da @ db
            assert_same([product.full_tensor()], [a @ b])
            product.sum().backward()
            assert_same([da.grad.full_tensor()], [torch.ones(6, 4) @ b.T])
    da = distribute_tensor(a, mesh, [Shard(0)])
    assert_same(
        [(da + 1).full_tensor(), da.sum().full_tensor(), da.max().full_tensor(), da.sum(0).full_tensor()],
        [a + 1, a.sum(), a.max(), a.sum(0)],
    )
    assert_same([da.mean(1).full_tensor()], [a.mean(1)])
    assert_same(
        [
            zeros(4, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor(),
            ones(5, 3, device_mesh=mesh, placements=[Shard(1)]).full_tensor(),
        ],
        [torch.zeros(4, 4), torch.ones(5, 3)],
    )
    # Softmax over the sharded dimension needs every shard; the sums are rounded, so not exact.
    torch.testing.assert_close(distribute_tensor(a, mesh, [Shard(1)]).softmax(1).full_tensor(), a.softmax(1))


def test_operations():
    run(operations, 2)


def mesh_2d(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert list(mesh.get_coordinate()) == [rank // 2, rank % 2]
    row, column = mesh["rows"].get_group(), mesh["columns"].get_group()
    assert dist.get_process_group_ranks(row) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(column) == [rank // 2 * 2, rank // 2 * 2 + 1]
    for group in (row, column):
        value = torch.tensor([1 << rank])
        dist.all_reduce(value, group=group)
        assert value.item() == sum(1 << r for r in dist.get_process_group_ranks(group))

    whole = integers(5, 6, seed=4)
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Replicate()]):
        tensor = distribute_tensor(whole, mesh, placements)
        assert_same([tensor.full_tensor()], [whole])
        moved = tensor.redistribute(mesh, [Shard(1), Shard(0)])
        assert_same([moved.full_tensor()], [whole])
    partial = DTensor.from_local(whole, mesh, [Partial(), Replicate()])
    assert_same([partial.full_tensor()], [whole * 2])

    flat = mesh["rows", "columns"]._flatten("all")
    value = torch.tensor([rank])
    dist.all_reduce(value, group=flat.get_group())
    assert value.item() == 6


def test_device_mesh_of_two_dimensions():
    run(mesh_2d, 4)


def whole_gradients(model):
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def tensor_parallel(rank, size):
    """Colwise then Rowwise: one all_reduce forward, one backward; every rank sees the same batch."""
    reference = integer_weights(Net(width=8, out=4))
    x, y = batch(0)
    squared_error(reference(x), y).backward()
    mesh = init_device_mesh("cpu", (size,))
    model = parallelize_module(
        integer_weights(Net(width=8, out=4)), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    )
    assert model.net1.weight.to_local().shape == (8 // size, 6)
    assert model.net2.weight.to_local().shape == (4, 8 // size)
    output = model(x)
    assert_same([output], [reference(x)])
    squared_error(output, y).backward()
    assert_same(whole_gradients(model), grads(reference))


def test_tensor_parallel():
    run(tensor_parallel, 2)


def test_tensor_parallel_on_four_ranks():
    run(tensor_parallel, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mlp = Net(width=8, out=6)

    def forward(self, x):
        return self.mlp(self.norm(x))


def sequence_parallel(rank, size):
    """The norm works on a part of the sequence: all_gather before the layers, reduce_scatter after."""
    reference = Block().double()
    model = copy.deepcopy(reference)
    x = integers(2, 4 * size, 6, seed=8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(
        model,
        mesh,
        {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.net1": ColwiseParallel(),
            "mlp.net2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    )
    part = distribute_tensor(x, mesh, [Shard(1)])
    output = model(part)
    expected = reference(x)
    # Not exact: the layer norm divides by a root, and the sums are grouped by rank.
    torch.testing.assert_close(output.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    (output**2).sum().backward()
    (expected**2).sum().backward()
    for got, wanted in zip(whole_gradients(model), grads(reference)):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_sequence_parallel():
    run(sequence_parallel, 2)


def distributed_module(rank, size):
    """distribute_module broadcasts rank 0's parameters."""
    mesh = init_device_mesh("cpu", (size,))
    model = distribute_module(integer_weights(Net(), seed=7 + rank), mesh)
    expected = integer_weights(Net(), seed=7)
    assert_same([p.full_tensor() for p in model.parameters()], expected.parameters())


def test_distribute_module():
    run(distributed_module, 2)


def data_and_tensor_parallel(rank, size):
    """A 2 x 2 mesh: FSDP2 over one dimension, tensor parallelism over the other."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = integer_weights(Net(width=8, out=4))
    replica = mesh["dp"].get_local_rank()
    for r in (0, 1):
        x, y = batch(r)
        (squared_error(reference(x), y) / 2).backward()
    model = parallelize_module(
        integer_weights(Net(width=8, out=4)), mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["dp"])
    x, y = batch(replica)
    squared_error(model(x), y).backward()
    assert_same(whole_gradients(model), grads(reference))


def test_fsdp_with_tensor_parallel():
    run(data_and_tensor_parallel, 4)
