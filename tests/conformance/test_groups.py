"""Many groups in one process: how they are made, who is who in them, and that they do not wait for each other."""

import copy
import itertools
import os
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from c10d_custom.errors import UsageError

from . import reference
from .cases import AS_GIVEN, Case, Group, check
from .cases import group as make_group


def _differences(**pairs):
    return [f"{what}: {problem}" for what, (got, want) in pairs.items() if (problem := reference.difference(got, want))]


def _use(pg, ranks, count=1000):
    """One of each kind on a group whose members are these global ranks, in this order."""
    g = Group(pg, tuple(ranks))
    case = Case(torch.int64, count, "SUM", "rough")
    everyone = [g.input(case, i) for i in range(g.size)]
    summed, spread, gathered = g.input(case), g.input(case), torch.zeros(g.size * count, dtype=torch.int64)
    dist.all_reduce(summed, group=pg)
    dist.all_gather_into_tensor(gathered, g.input(case), group=pg)
    dist.broadcast(spread, g.ranks[-1], group=pg)
    dist.barrier(pg)
    return _differences(
        all_reduce=(summed, g.reduced(case)),
        all_gather=(gathered, torch.cat(everyone)),
        broadcast=(spread, everyone[-1]),
    )


def _unsorted():
    g = make_group("unsorted")
    if g.me is None:
        return []
    wrong = []
    for what, got, want in (
        ("rank", dist.get_rank(g.pg), g.me),
        ("size", dist.get_world_size(g.pg), g.size),
        ("ranks", dist.get_process_group_ranks(g.pg), list(g.ranks)),
        ("group rank", dist.get_group_rank(g.pg, dist.get_rank()), g.me),
        ("global rank", dist.get_global_rank(g.pg, g.me), dist.get_rank()),
        ("pg.rank()", g.pg.rank(), g.me),
        ("pg.size()", g.pg.size(), g.size),
        ("backend", dist.get_backend(g.pg), dist.get_backend()),
    ):
        if got != want:
            wrong.append(f"{what}: {got} instead of {want}")
    return wrong + _use(g.pg, g.ranks)


def test_unsorted(ranks):
    check(ranks, _unsorted)


def _alone():
    """A group of one: everything is a copy."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    me = dist.get_rank()
    wrong = _use(groups[me], [me], 0) + _use(groups[me], [me], 1) + _use(groups[me], [me], 300007)
    data = torch.full((4,), 2.0)
    output = torch.zeros(4)
    dist.all_reduce(data, dist.ReduceOp.AVG, groups[me])
    dist.reduce_scatter_tensor(output, data, group=groups[me])
    wrong += _differences(avg=(data, torch.full((4,), 2.0)), reduce_scatter=(output, data))
    for pg in groups:
        if pg is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(pg)
    return wrong


def test_alone(ranks):
    check(ranks, _alone)


def _several_at_once():
    """All pairs of ranks, one call on each outstanding at a time, then waited for in reverse."""
    world = dist.get_world_size()
    pairs = list(itertools.combinations(range(world), 2))[:10]
    groups = [Group(dist.new_group(list(pair)), pair) for pair in pairs]
    wrong = []
    for count in (10, 100000):
        case = Case(torch.int64, count, "SUM", "rough")
        issued = []
        for g in groups:
            if g.me is not None:
                data = g.input(case)
                issued.append((g, data, dist.all_reduce(data, group=g.pg, async_op=True)))
        for g, data, work in reversed(issued):
            work.wait()
            wrong += _differences(**{f"ranks {g.ranks}": (data, g.reduced(case))})
    for g in groups:
        if g.me is not None:
            dist.destroy_process_group(g.pg)
    return wrong


def test_several_at_once(ranks):
    check(ranks, _several_at_once)


def _in_opposite_orders():
    """Groups are independent: async calls on two of them may be issued in another order on each rank."""
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    wrong = []
    for turn in range(10):
        order = groups if (dist.get_rank() + turn) % 2 else groups[::-1]
        issued = []
        for pg in order:
            data = torch.full((60000,), float(1 + groups.index(pg)))
            issued.append((data, dist.all_reduce(data, group=pg, async_op=True), world * (1.0 + groups.index(pg))))
        for data, work, want in issued:
            work.wait()
            wrong += _differences(**{f"turn {turn}": (data, torch.full((60000,), want))})
    for pg in groups:
        dist.destroy_process_group(pg)
    return wrong


def test_in_opposite_orders(ranks):
    check(ranks, _in_opposite_orders)


def _subgroups(size):
    mine, _ = dist.new_subgroups(group_size=size)
    start = dist.get_rank() // size * size
    wrong = _use(mine, range(start, start + size))
    world = dist.get_world_size()
    halves = [list(range(0, world, 2)), list(range(1, world, 2))]
    mine, _ = dist.new_subgroups_by_enumeration(halves)
    return wrong + _use(mine, halves[dist.get_rank() % 2])


@pytest.mark.world_sizes(2, 4, 8)
def test_subgroups(ranks):
    check(ranks, _subgroups, ranks.world_size // 2)


_NUMBERED_BY_CALLS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def _made_by_members_only():
    world = dist.get_world_size()
    ranks = [0, world - 1]
    if dist.get_rank() not in ranks:
        if _NUMBERED_BY_CALLS:
            # ... and later groups by what each rank has counted: where only some ranks make one, the next new_group of
            # all waits in vain, whatever the backend.
            ranks = list(range(1, world - 1))
        else:
            return []  # groups made so are numbered by those that a rank has, which differ here
    pg = dist.new_group(ranks, use_local_synchronization=True)
    wrong = _use(pg, ranks)
    dist.destroy_process_group(pg)
    return wrong


def test_made_by_members_only(ranks):
    check(ranks, _made_by_members_only)


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


def _made_and_destroyed(times):
    ranks = list(range(dist.get_world_size()))
    if AS_GIVEN:
        ranks.reverse()
    wrong, before = [], None
    for turn in range(times):
        pg = dist.new_group(ranks, **AS_GIVEN)
        wrong += _use(pg, ranks)
        dist.destroy_process_group(pg)
        del pg
        if turn == times // 2:
            before = _descriptors()
    after = _descriptors()
    # One more may be open for a moment; what leaks, leaks for each group.
    if after > before + 1:
        wrong.append(f"{after - before} more open files after {times - times // 2 - 1} more groups")
    return wrong


def test_made_and_destroyed(ranks):
    check(ranks, _made_and_destroyed, 20)


def _split_group(halves):
    """The group's own method: dist.split_group needs an accelerator."""
    mine = next(half for half in halves if dist.get_rank() in half)
    pg = dist.group.WORLD.split_group(mine, timeout=timedelta(seconds=30), group_name=f"split-{mine}")
    g = Group(pg, tuple(mine))
    wrong = [] if (pg.rank(), pg.size()) == (g.me, g.size) else [f"rank {pg.rank()} of {pg.size()}"]
    case = Case(torch.float32, 1000, "SUM", "mild")
    data = g.input(case)
    pg.allreduce([data]).wait()
    return wrong + _differences(all_reduce=(data, g.reduced(case)))


@pytest.mark.world_sizes(2, 4, 8)
def test_split_group(ranks, beyond_gloo):
    beyond_gloo("the C++ method needs a backend bound to a device")
    world = ranks.world_size
    check(ranks, _split_group, [list(range(world // 2)), list(range(world // 2, world))])


def _mesh(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    columns = shape[1]
    row, column = divmod(dist.get_rank(), columns)
    wrong = _use(mesh.get_group("inner"), range(row * columns, (row + 1) * columns))
    wrong += _use(mesh.get_group("outer"), range(column, dist.get_world_size(), columns))
    wrong += _use(mesh["inner"].get_group(), range(row * columns, (row + 1) * columns))

    import torch.distributed._functional_collectives as funcol
    from torch.distributed.tensor import DTensor, Replicate, Shard

    total = funcol.all_reduce(torch.ones(3), "sum", (mesh, 1))
    wrong += _differences(functional=(total * 1, torch.full((3,), float(columns))))
    whole = torch.arange(24.0 * 8).view(8, 24)
    shards = DTensor.from_local(whole.chunk(shape[0])[row], mesh, [Shard(0), Replicate()])
    wrong += _differences(
        full_tensor=(shards.full_tensor(), whole),
        other_dim=(
            shards.redistribute(mesh, [Shard(1), Replicate()]).to_local(),
            whole.chunk(shape[0], dim=1)[row].contiguous(),
        ),
    )
    return wrong


@pytest.mark.world_sizes(4, 8)
def test_device_mesh(ranks):
    check(ranks, _mesh, (2, ranks.world_size // 2))


def _not_a_member():
    """Calls on a group that this rank is no member of do nothing."""
    g = make_group("unsorted")
    data = torch.full((3,), float(dist.get_rank()))
    want = data.clone() if g.me is None else torch.full((3,), float(sum(g.ranks)))
    dist.all_reduce(data, group=g.pg)
    dist.barrier(g.pg)
    return _differences(all_reduce=(data, want))


@pytest.mark.world_sizes(3, 4, 8)
def test_not_a_member(ranks):
    check(ranks, _not_a_member)


class Holder(torch.nn.Linear):
    def __init__(self, group):
        super().__init__(2, 2)
        self.group = group


def _held():
    wrong, made = [], dist.new_group()
    split = made.split_group(list(range(made.size())))
    for group in (dist.group.WORLD, made, split):
        holder = Holder(group)
        copies = [copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))]
        if any(c.group is not group or c.weight is holder.weight or c.weight.ne(holder.weight).any() for c in copies):
            wrong.append(f"{group.group_name}: {copies}")
    pickled = pickle.dumps(Holder(made))
    dist.destroy_process_group(made)
    split.shutdown()
    try:
        wrong.append(f"of a group that is gone: {pickle.loads(pickled).group}")
    except UsageError as error:
        if made.group_name not in str(error):
            wrong.append(str(error))
    return wrong


@pytest.mark.world_sizes(2)
def test_copies_of_what_holds_a_group_hold_the_same(ranks):
    check(ranks, _held)


def _forever(timeout):
    wrong, g = [], dist.new_group(timeout=timeout)
    t = torch.ones(3)
    dist.all_reduce(t, group=g)
    dist.all_reduce(t, group=g, async_op=True).wait(timeout)
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = min(timeout, timedelta(days=10**8)), False  # torch takes no more there
    g.allreduce([t], options)
    other = 1 - g.rank()
    works = [dist.isend(t, group=g, group_dst=other), dist.irecv(t.clone(), group=g, group_src=other)]
    for work in works:
        work.wait(timeout)
    g.monitored_barrier(timeout)
    g.set_timeout(timeout)
    dist.barrier(g)
    split = g.split_group(list(range(g.size())), timeout)
    dist.all_reduce(t, group=split)
    if t[0] != g.size() ** 4:
        wrong.append(f"{t}")
    split.shutdown()
    dist.destroy_process_group(g)
    return wrong


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("timeout", [timedelta(days=10_000), timedelta(days=300_000), timedelta.max], ids=str)
def test_time_outs_that_stand_for_ever(ranks, timeout):
    check(ranks, _forever, timeout)
