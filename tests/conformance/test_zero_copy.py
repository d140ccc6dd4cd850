"""Tensors of c10d_custom.empty: every operation gives the bits that it gives of other tensors, and large ones of three
operations are read and written where they lie."""

import functools

import pytest
import torch
import torch.distributed as dist

import c10d_custom

from . import reference, values
from .cases import Case, check, group, run_cases
from .selection import cases_of, time_for
from .strides import Placed
from .test_all_gather import all_gather, all_gather_into_tensor, all_gather_uneven
from .test_all_reduce import all_reduce
from .test_all_to_all import all_to_all
from .test_broadcast import broadcast
from .test_gather import gather
from .test_reduce import reduce
from .test_reduce_scatter import reduce_scatter, reduce_scatter_tensor
from .test_scatter import scatter
from .test_send_recv import send_recv

REDUCING = (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)
PERFORM = {
    f.__name__: f
    for f in (
        *REDUCING,
        *(all_gather, all_gather_into_tensor, all_gather_uneven),
        *(broadcast, gather, scatter, all_to_all, send_recv),
    )
}


def moved(tensor):
    """The same in memory from c10d_custom.empty."""
    new = c10d_custom.empty(tensor.shape, dtype=tensor.dtype)
    return new.copy_(tensor)


def in_arenas(name, cases, some):
    """``some``: the tensors of every other rank only."""
    plain = Placed.__init__

    def placed(self, *arguments, **options):
        plain(self, *arguments, **options)
        self._memory = moved(self._memory)
        self.tensor = self._view(self._memory)

    if not some or dist.get_rank() % 2:
        Placed.__init__ = placed
    try:
        return run_cases(PERFORM[name], cases)
    finally:
        Placed.__init__ = plain


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("section", ["pairs", "sizes", "offset", "mixed"])
@pytest.mark.parametrize("name", PERFORM)
def test_every_operation(ranks, full, beyond_gloo, name, section, some):
    beyond_gloo("has no such tensors")
    if ranks.world_size != 2 and (section != "pairs" or PERFORM[name] not in (all_reduce, reduce_scatter, all_gather)):
        pytest.skip("with 2 ranks only")
    cases = cases_of(name, section, PERFORM[name] in REDUCING, full, ranks.world_size)
    check(ranks, in_arenas, name, cases, some, timeout=time_for(cases))


# --- the way they go

KIB = 1024


def blocks():
    """How many this rank has reduced: a call that works where the tensors lie counts as one."""
    return dist.group.WORLD.cpu_transport.states(0)[dist.get_rank()].blocks_reduced


def counted(call):
    before = blocks()
    call()
    return blocks() - before


def one(case, place, call, want):
    """What was wrong of a call on a tensor at ``place``, of which all ranks' are in arenas."""
    place.copy_(group().input(case).view(place.shape))
    count = counted(call)
    wrong = [] if count == 1 else [f"{case}: {count} blocks"]
    difference = reference.difference(place, want)
    return wrong + ([f"{case}: {difference}"] if difference else [])


def views():
    """Parts of one tensor, at any address, of any shape."""
    me, wrong = dist.get_rank(), []
    for dtype in (torch.float32, torch.uint8, torch.float64):
        count = 200 * KIB // dtype.itemsize + 13
        case = Case(dtype, count, "SUM", "rough")
        memory = c10d_custom.empty(2 * count + 99, dtype=dtype)
        memory.view(torch.uint8).fill_(1)
        # Each rank's is elsewhere.
        part = memory[17 + me : 17 + me + count]
        wrong += one(case, part, functools.partial(dist.all_reduce, part), group().reduced(case))
        around = torch.cat([memory[: 17 + me], memory[17 + me + count :]]).view(torch.uint8)
        wrong += [] if around.eq(1).all() else [f"{case}: memory around it was written"]
    matrix = c10d_custom.empty((31, 7, 300), dtype=torch.float32)
    case = Case(torch.float32, matrix.numel(), "AVG", "rough")
    wrong += one(case, matrix, lambda: dist.all_reduce(matrix, dist.ReduceOp.AVG), group().reduced(case))
    return wrong


def several_parts_at_once():
    """Asynchronous ones of one tensor, which all end before any is looked at."""
    count, wrong = 50_001, []
    case = Case(torch.float32, 8 * count, "SUM", "rough")
    memory = c10d_custom.empty(8 * count)
    memory.copy_(group().input(case))
    works = [dist.all_reduce(part, async_op=True) for part in memory.chunk(8)]
    for work in works:
        work.wait()
    difference = reference.difference(memory, group().reduced(case))
    return wrong + ([difference] if difference else [])


def own_parts():
    """all_gather from, and reduce_scatter to, a rank's own part of the other side."""
    me, size, wrong = dist.get_rank(), dist.get_world_size(), []
    count = 100 * KIB + 5
    case = Case(torch.float32, count, "SUM", "rough")
    wide = c10d_custom.empty(size * count)
    own = wide[me * count : (me + 1) * count]
    own.copy_(group().input(case))
    n = counted(lambda: dist.all_gather_into_tensor(wide, own))
    got = torch.cat([group().input(case, r) for r in range(size)])
    wrong += [f"all_gather: {n} blocks"] if n != 1 else []
    wrong += filter(None, [reference.difference(wide, got)])
    wide.copy_(group().input(case, count=size * count))
    n = counted(lambda: dist.reduce_scatter_tensor(own, wide))
    wrong += [f"reduce_scatter: {n} blocks"] if n != 1 else []
    wrong += filter(None, [reference.difference(own, group().reduced(case, start=me * count))])
    # What is not its own, other ranks have read: and it is what it was.
    others = torch.cat([wide[: me * count], wide[(me + 1) * count :]])
    given = group().input(case, count=size * count)
    wrong += filter(None, [reference.difference(others, torch.cat([given[: me * count], given[(me + 1) * count :]]))])
    return wrong


def not_everywhere():
    """A tensor of one rank, of another group: the ordinary way."""
    me, wrong, count = dist.get_rank(), [], 500_000
    others = dist.new_group()
    for what, make in {
        "of one rank": lambda: c10d_custom.empty(count) if me == 0 else torch.empty(count),
        "of another group": lambda: c10d_custom.empty(count, group=others),
    }.items():
        case = Case(torch.float32, count, "SUM", "rough")
        t = make()
        t.copy_(group().input(case))
        n = counted(lambda: dist.all_reduce(t))
        wrong += [f"{what}: {n} blocks"] if n == 1 else []
        wrong += filter(None, [reference.difference(t, group().reduced(case))])
    dist.destroy_process_group(others)
    return wrong


@pytest.mark.world_sizes(2, 3, 8)
@pytest.mark.parametrize("case", [views, several_parts_at_once, own_parts, not_everywhere], ids=lambda f: f.__name__)
def test_where_they_are_read(ranks, beyond_gloo, case):
    beyond_gloo("has no such tensors")
    if ranks.layout:
        pytest.skip("in a host only")
    check(ranks, case)


# --- the tensors

SHAPES = (0, 5, (), (3,), (2, 0), 33_000, (40_000,), (30, 7, 200), torch.Size([2, 20_000]))  # of few bytes and of more


def like_torchs():
    wrong = []
    for dtype in values.DTYPES:
        for shape in SHAPES:
            t, u = c10d_custom.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
            same = (t.shape, t.stride(), t.dtype, t.device, t.is_leaf, t._base) == (
                *(u.shape, u.stride(), u.dtype, u.device, u.is_leaf, u._base),
            )
            wrong += [] if same else [f"{dtype} {shape}: {t.shape} {t.stride()} {t.dtype} {t.device}"]
            t.view(torch.uint8).fill_(1) if t.dim() else t.fill_(1)
    torch.set_default_dtype(torch.float64)
    wrong += [] if c10d_custom.empty(3).dtype is torch.float64 else ["the default dtype"]
    torch.set_default_dtype(torch.float32)
    return wrong


def refused():
    wrong = []
    for kind, call in {
        TypeError: lambda: c10d_custom.empty("3"),
        RuntimeError: lambda: c10d_custom.empty(-1),
        ValueError: lambda: c10d_custom.empty(3, group=object()),
    }.items():
        try:
            call()
            wrong.append(f"{kind}: nothing was raised")
        except kind:
            pass
    return wrong


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("case", [like_torchs, refused], ids=lambda f: f.__name__)
def test_they_are_tensors_like_others(ranks, beyond_gloo, case):
    beyond_gloo("has no such tensors")
    check(ranks, case)
