"""Addresses that are none, storage that has been freed, no memory for a copy: the other ranks are told.
Classes of tensors: with memory of their own, and without."""

import pytest
import torch
import torch.distributed as dist

from c10d_custom import dtypes
from c10d_custom.call import Call, Message, Op, Region
from c10d_custom.errors import CollectiveMismatchError, UsageError


def _call(address, count):
    call = Call(Op.all_reduce, "all_reduce", dtypes.BY_DTYPE[torch.float32], 20.0, count=count)
    call.inputs = call.outputs = [Region(address, 4 * count, count)]
    return call


def no_memory(count, bad):
    group = dist.new_group()
    if dist.get_rank() == bad:
        with pytest.raises(UsageError, match="no memory at"):
            group._transport.run(_call(0, count))
    else:
        with pytest.raises(CollectiveMismatchError, match=f"rank {bad}: a call whose arguments were refused"):
            dist.all_reduce(torch.ones(count), group=group)
    dist.destroy_process_group(group)


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("count", [1, 1 << 20])
def test_a_collective_without_memory_is_told(ranks, count):
    ranks.run(no_memory, count, 1)


def no_message():
    group, me = dist.new_group(), dist.get_rank()
    for is_recv in (False, True):
        message = Message("send", Region(0, 16, 4), dtypes.BY_DTYPE[torch.float32], 1 - me, 0, 20.0, is_recv)
        ticket = group._transport.post(message)
        with pytest.raises(UsageError, match="no memory at"):
            ticket.wait(5.0)
            raise ticket.error()
    t = torch.full((4,), float(me))
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, t.clone(), 1 - me, group), dist.P2POp(dist.irecv, t, 1 - me, group)]
    ):
        work.wait()
    assert t.tolist() == [1.0 - me] * 4
    dist.destroy_process_group(group)


@pytest.mark.world_sizes(2)
def test_a_message_without_memory_is_refused(ranks):
    ranks.run(no_message)


def _freed(contiguous):
    t = torch.ones(100_006)
    part = t[100_002:].view(2, 2)  # whose address is then not 0
    if not contiguous:
        part = part.t()
    t.untyped_storage().resize_(0)
    return part


def _no_copy(*_):
    raise MemoryError("no memory for a copy")


def unprepared(bad, kind):
    group = dist.new_group()
    if dist.get_rank() != bad:
        with pytest.raises(CollectiveMismatchError, match=f"rank {bad}: a call whose arguments were refused"):
            dist.all_reduce(torch.ones(4), group=group)
    elif "freed" in kind:
        with pytest.raises(UsageError, match="all_reduce: tensor has 4 elements, but its storage has been freed"):
            dist.all_reduce(_freed(kind == "freed"), group=group)
    else:
        group._lower.all_reduce = _no_copy
        with pytest.raises(MemoryError, match="no memory for a copy"):
            dist.all_reduce(torch.ones(2, 2).t(), group=group)
    dist.destroy_process_group(group)


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("kind", ["freed", "freed, strided", "no copy"])
def test_what_keeps_a_call_from_being_made_is_told(ranks, kind):
    ranks.run(unprepared, 1, kind)


class Own(torch.Tensor):
    """With memory of its own; its class sees each operator."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_subclass(cls, t)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


class Wrapper(Own):
    """Without, and takes itself for a plain one."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)


def classes():
    me, size = dist.get_rank(), dist.get_world_size()
    for t in (torch.full((4,), me + 1.0), torch.full((2, 3), me + 1.0).t(), torch.full((9,), me + 1.0)[5:]):
        every = torch.zeros(size * t.numel())
        dist.all_gather_into_tensor(every, Own(t))
        assert every.view(size, -1)[:, -1].tolist() == [r + 1.0 for r in range(size)]
        dist.all_reduce(Own(t))
        assert (t == size * (size + 1) / 2).all(), t
        t.fill_(me)
        dist.broadcast(Own(t), size - 1)
        assert (t == size - 1).all(), t
        for count in (4, 0):
            with pytest.raises(UsageError, match="has no memory of its own|no memory that can be communicated"):
                dist.all_reduce(Wrapper(torch.ones(count)))
    dist.barrier()


def test_a_class_s_own_memory_is_moved_and_wrappers_are_refused(ranks):
    ranks.run(classes)
