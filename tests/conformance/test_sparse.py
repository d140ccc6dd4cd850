"""all_reduce of sparse COO tensors, and DDP over a sparse embedding, which uses it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from c10d_custom.errors import CollectiveMismatchError, UsageError


def part(rank):
    """Overlapping, repeated and (on rank 1) no coordinates; values whose sums are exact."""
    if rank == 1:
        return torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0, 3), (5, 7, 3))
    indices = torch.tensor([[rank % 5, 1, 1], [rank % 7, 2, 2]])
    return torch.sparse_coo_tensor(indices, torch.arange(9.0).view(3, 3) + rank, (5, 7, 3))


def sum_case(asynchronous):
    size = dist.get_world_size()
    tensor = part(dist.get_rank())
    work = dist.all_reduce(tensor, async_op=asynchronous)
    if asynchronous:
        work.wait()
        assert work.result()[0] is tensor
    expected = sum(part(r).to_dense() for r in range(size))
    return None if torch.equal(tensor.to_dense(), expected) else (tensor, expected)


def refused_case():
    try:
        dist.all_reduce(part(0), ReduceOp.MAX)
        return "MAX of sparse tensors was accepted"
    except UsageError:
        return None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sum(ranks, asynchronous):
    assert not any(found := ranks.run(sum_case, asynchronous)), found


def test_only_sums_are_known(ranks, beyond_gloo):
    beyond_gloo("says so with an error of its own")
    assert not any(found := ranks.run(refused_case)), found


def outside_case():
    index = 10**9 if dist.get_rank() == 0 else 1
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[index]]), torch.ones(1), (5,), is_coalesced=True, check_invariants=False
    )
    try:
        dist.all_reduce(tensor)
        return "an index outside of the shape was taken"
    except RuntimeError as error:
        dist.barrier()
        return None if "size is inconsistent with indices" in str(error) else str(error)


def test_a_peer_s_index_outside_of_the_shape_is_refused(ranks, beyond_gloo):
    beyond_gloo("takes it")
    assert not any(found := ranks.run(outside_case)), found


# (sizes, sparse dimensions) of rank 0's tensor and of the others'.
SHAPES = {
    "size": (((5,), 1), ((10,), 1)),
    "order of sizes": (((2, 8), 2), ((8, 2), 2)),
    "dimensions": (((2, 1), 2), ((2,), 1)),
    "sparse dimensions": (((5, 3), 1), ((5, 3), 2)),
}


def of_shape(sizes, sparse):
    return torch.sparse_coo_tensor(torch.zeros(sparse, 1, dtype=torch.int64), torch.ones(1, *sizes[sparse:]), sizes)


def shapes_case(which):
    mine, wanted = SHAPES[which][dist.get_rank() > 0], SHAPES[which]
    tensor = of_shape(*mine)
    try:
        dist.all_reduce(tensor)
        return "different shapes were taken"
    except CollectiveMismatchError as error:
        text = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    lines = [f"rank {r}: sizes {list(sizes)}, of which {sparse} sparse" for r, (sizes, sparse) in enumerate(wanted)]
    good = all(line in text for line in lines) and total.item() == dist.get_world_size()
    return None if good and torch.equal(tensor.to_dense(), of_shape(*mine).to_dense()) else text


@pytest.mark.parametrize("which", SHAPES)
@pytest.mark.world_sizes(2, 3)
def test_different_shapes_are_refused_by_all(ranks, beyond_gloo, which):
    beyond_gloo("says so with an error of its own")
    assert not any(found := ranks.run(shapes_case, which)), found


def ddp_case():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Embedding(16, 4, sparse=True)
    alone = torch.nn.Embedding(16, 4, sparse=True)
    alone.load_state_dict(model.state_dict())
    words = [torch.tensor([r, 3, 3 + r]) for r in range(size)]
    parallel = DistributedDataParallel(model)
    parallel(words[rank]).sum().backward()
    for w in words:
        alone(w).sum().backward()
    got, expected = model.weight.grad.to_dense() * size, alone.weight.grad.to_dense()
    return None if torch.allclose(got, expected) else (got, expected)  # the division by size rounds


@pytest.mark.world_sizes(2, 3)
def test_ddp_of_a_sparse_embedding(ranks):
    assert not any(found := ranks.run(ddp_case)), found


def _sorted(tensor):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        dist.all_reduce(tensor)
    return sum(event.count for event in seen.key_averages() if event.key == "aten::_coalesce")


def sorting_case():
    times = _sorted(torch.sparse_coo_tensor(torch.tensor([[1, 0, 1]]), torch.ones(3, 2), (5, 2)))
    return None if times == 1 else f"sorted {times} times"


def test_entries_are_sorted_once(ranks, beyond_gloo):
    """Before they are sent. What all ranks have sent is merged in order."""
    beyond_gloo("sorts the sum, too")
    assert not any(found := ranks.run(sorting_case)), found


def unsorted_case():
    """What is said to be coalesced, and is not."""
    indices = torch.tensor([[3, 1, 3]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(3), (5,), is_coalesced=True, check_invariants=False)
    dist.all_reduce(tensor)
    size = dist.get_world_size()
    return None if tensor.to_dense().tolist() == [0, size, 0, 2 * size, 0] else tensor


def test_entries_that_are_not_in_order(ranks):
    assert not any(found := ranks.run(unsorted_case)), found
