"""Outputs with elements that share memory (expanded tensors, say) are refused on their rank before anything moves, and
the other ranks hear of it."""

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import UsageError

from .cases import check

pytestmark = pytest.mark.world_sizes(3)

COUNT = 6
BAD = 1  # the rank that has such an output, and the root where there is one


NAMES = ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "gather", "scatter")
NAMES += ("reduce_scatter", "reduce_scatter_tensor", "all_to_all")


def _shared():
    """Tensors of COUNT elements."""
    yield "expanded", torch.zeros(1).expand(COUNT)
    yield "of expanded rows", torch.zeros(3).expand(2, 3)
    yield "that run into each other", torch.zeros(4).as_strided((2, 3), (1, 1))
    yield "that meet in one place", torch.zeros(7).as_strided((2, 3), (2, 1))


def _apart():
    """Dimensions that run into each other, and never meet."""
    return torch.zeros(8).as_strided((2, 3), (3, 2))


def _plain():
    return torch.zeros(COUNT)


def _lists(output):
    """Lists of outputs for each rank, this one at each place."""
    size = dist.get_world_size()
    return [[output if r == at else _plain() for r in range(size)] for at in range(size)]


def _calls(name, output, group, asynchronous):
    """With the output in each place where there may be one."""
    me, size = dist.get_rank(), dist.get_world_size()
    ones, at_root = torch.ones(COUNT), me == BAD
    how = {"group": group, "async_op": asynchronous}
    each = list(torch.ones(size, COUNT))
    return {
        "all_reduce": [lambda: dist.all_reduce(output, **how)],
        "all_reduce_coalesced": [lambda: dist.all_reduce_coalesced([_plain(), output], **how)],
        "broadcast": [lambda: dist.broadcast(output, (BAD + 1) % size, **how)],
        "reduce": [lambda: dist.reduce(output, BAD, **how)],
        "all_gather": [lambda outputs=outputs: dist.all_gather(outputs, ones, **how) for outputs in _lists(output)],
        "gather": [
            lambda outputs=outputs: dist.gather(ones, outputs if at_root else None, BAD, **how)
            for outputs in _lists(output)
        ],
        "scatter": [lambda: dist.scatter(output, each if at_root else None, BAD, **how)],
        "reduce_scatter": [lambda: dist.reduce_scatter(output, each, **how)],
        "reduce_scatter_tensor": [lambda: dist.reduce_scatter_tensor(output, torch.ones(size * COUNT), **how)],
        "all_to_all": [lambda outputs=outputs: dist.all_to_all(outputs, each, **how) for outputs in _lists(output)],
    }[name]


def _outcome(call):
    try:
        work = call()
        if work is not None:
            work.wait()
        return None
    except Exception as error:
        return error


def _refused(name, asynchronous):
    me, wrong = dist.get_rank(), []
    for what, shared in list(_shared())[:: 3 if asynchronous else 1]:
        output = shared if me == BAD else _plain()
        for at in range(len(_calls(name, output, None, asynchronous))):
            group = dist.new_group()  # it ends with the refusal
            error = _outcome(_calls(name, output, group, asynchronous)[at])
            if me == BAD and not (isinstance(error, UsageError) and "share memory" in str(error)):
                wrong.append(f"{what}, {at}: {type(error).__name__}: {error}")
            if me != BAD and "arguments were refused" not in str(error):
                wrong.append(f"{what}, {at}: this rank was told {type(error).__name__}: {error}")
            dist.destroy_process_group(group)
        if shared.any():
            wrong.append(f"{what}: it was written")
    for call in _calls(name, _apart(), None, asynchronous):
        if error := _outcome(call):
            wrong.append(f"elements that never meet: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", NAMES)
def test_refused(ranks, beyond_gloo, name, asynchronous):
    beyond_gloo("writes them")
    check(ranks, _refused, name, asynchronous)


def _whole():
    """Outputs of several parts in one tensor."""
    me, size, wrong = dist.get_rank(), dist.get_world_size(), []
    for name, call in {
        "all_gather_into_tensor": lambda t, group: dist.all_gather_into_tensor(t, torch.ones(COUNT), group),
        "all_to_all_single": lambda t, group: dist.all_to_all_single(t, torch.ones(size * COUNT), group=group),
    }.items():
        group, output = dist.new_group(), torch.zeros(size * COUNT)
        error = _outcome(lambda: call(output[:1].expand(size * COUNT) if me == BAD else output, group))
        if ("share memory" if me == BAD else "arguments were refused") not in str(error):
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        dist.destroy_process_group(group)
    return wrong


def test_refused_of_several_parts(ranks, beyond_gloo):
    beyond_gloo("writes them, or refuses all that is not contiguous")
    check(ranks, _whole)


def _received():
    """The message is there for the receive that can take it."""
    me, wrong = dist.get_rank(), []
    for count in (COUNT, 30000):  # short, long
        for receive in (dist.recv, lambda t, source: dist.irecv(t, source).wait(), lambda t, _: dist.recv(t)):
            if me == 0:
                dist.send(torch.full((count,), 7.0), BAD)
            elif me == BAD:
                error = _outcome(lambda: receive(torch.zeros(1).expand(count), 0) and None)
                if not isinstance(error, UsageError):
                    wrong.append(f"{count}: {type(error).__name__}: {error}")
                whole = torch.zeros(count)
                dist.recv(whole, 0)
                if not (whole == 7).all():
                    wrong.append(f"{count}: the message was {whole}")
    dist.barrier()
    return wrong


def test_a_receive_is_refused(ranks, beyond_gloo):
    beyond_gloo("writes them")
    check(ranks, _received)


def _read():
    """As inputs they are taken."""
    size, root = dist.get_world_size(), dist.get_rank() == 0
    shared, whole = torch.ones(1).expand(COUNT), torch.zeros(size * COUNT)
    dist.all_gather(list(whole.chunk(size)), shared)
    into = shared if root else torch.zeros(COUNT)
    dist.broadcast(into, 0)
    dist.reduce(torch.zeros(COUNT) if root else shared, 0)
    return [] if whole.tolist() == [1] * len(whole) and into.tolist() == [1] * COUNT else [f"{whole}, {into}"]


def test_inputs_may_share_elements(ranks):
    check(ranks, _read)
