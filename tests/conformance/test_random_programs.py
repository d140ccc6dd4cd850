"""Random programs of collectives over random groups, against a reference that computes every rank's result in one
process: a state machine of hypothesis, whose steps run on all ranks of a pool at once. What fails is made smaller, and
printed as the steps that lead to it."""

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

_groups = {}  # in a rank: name -> its group

OPS = {"SUM": torch.sum, "PRODUCT": torch.prod, "MIN": torch.amin, "MAX": torch.amax}
DTYPES = ["int64", "int32", "uint8", "float32", "float64", "bfloat16"]
# Around nothing, a slot for small messages (16 KB) and a block (128 KB); in elements.
COUNTS = st.one_of(st.integers(0, 9), st.sampled_from([2047, 2048, 2049, 4096, 16384, 16385, 32768, 40001, 300007]))


def values(rank, seed, count, dtype):
    """Small integers, so that sums and products are exact in every dtype."""
    i = torch.arange(count)
    return ((i * 7 + rank * 3 + seed) % 3).to(getattr(torch, dtype))


def reduced(inputs, op):
    return OPS[op](torch.stack(inputs).to(torch.int64), 0).to(inputs[0].dtype)


def new_group_case(name, members):
    _groups[name] = dist.new_group(members, use_local_synchronization=False)


def drop_group_case(name):
    group = _groups.pop(name)
    if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)


def program_case(name, members, steps):
    """Issues the steps one after the other, waits for what was asynchronous in the order given, and returns what each
    produced. Ranks outside the group do nothing."""
    if dist.get_rank() not in members:
        return None
    group, me, n = _groups[name], members.index(dist.get_rank()), len(members)
    outcomes, works = [], []
    for step in steps:
        out, work = issue(group, me, n, members, *step)
        outcomes.append(out)
        works.append(work)
    for work in reversed(works):
        if work is not None:
            work.wait()
    return outcomes


def issue(group, me, n, members, kind, seed, count, dtype, op, root, asynchronous):
    mine = values(me, seed, count, dtype)
    how = {"group": group, "async_op": asynchronous}
    at = members[root]
    reduce_op = getattr(dist.ReduceOp, op)

    def empty(k=1):
        return torch.full((k * count,), 99, dtype=mine.dtype)

    if kind == "all_reduce":
        return mine, dist.all_reduce(mine, reduce_op, **how)
    if kind == "broadcast":
        return mine, dist.broadcast(mine, at, **how)
    if kind == "reduce":
        work = dist.reduce(mine, at, reduce_op, **how)
        return (mine if me == root else None), work
    if kind == "all_gather":
        out = empty(n)
        return out, dist.all_gather_into_tensor(out, mine, **how)
    if kind == "reduce_scatter":
        out = empty()
        return out, dist.reduce_scatter_tensor(out, values(me, seed, n * count, dtype), reduce_op, **how)
    if kind == "all_to_all":
        # Rank r sends (r + j + seed) % 3 pieces to rank j.
        sent = [(me + j + seed) % 3 * count for j in range(n)]
        got = [(j + me + seed) % 3 * count for j in range(n)]
        out = torch.full((sum(got),), 99, dtype=mine.dtype)
        return out, dist.all_to_all_single(out, values(me, seed, sum(sent), dtype), got, sent, **how)
    if kind == "gather":
        out = [empty() for _ in range(n)] if me == root else None
        return out, dist.gather(mine, out, at, **how)
    if kind == "scatter":
        parts = [values(j, seed + root, count, dtype) for j in range(n)] if me == root else None
        out = empty()
        return out, dist.scatter(out, parts, at, **how)
    if kind == "ring":
        out = empty()
        works = [
            dist.isend(mine, members[(me + 1) % n], group=group, tag=seed),
            dist.irecv(out, members[me - 1], group=group, tag=seed),
        ]
        return out, _All(works)
    return None, dist.barrier(**how)


class _All:
    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


def expected(me, n, kind, seed, count, dtype, op, root, asynchronous):
    inputs = [values(r, seed, count, dtype) for r in range(n)]
    if kind == "all_reduce":
        return reduced(inputs, op)
    if kind == "broadcast":
        return inputs[root]
    if kind == "reduce":
        return reduced(inputs, op) if me == root else None
    if kind == "all_gather":
        return torch.cat(inputs)
    if kind == "reduce_scatter":
        whole = reduced([values(r, seed, n * count, dtype) for r in range(n)], op)
        return whole[me * count : (me + 1) * count]
    if kind == "all_to_all":
        parts = []
        for r in range(n):
            sizes = [(r + j + seed) % 3 * count for j in range(n)]
            parts.append(values(r, seed, sum(sizes), dtype)[sum(sizes[:me]) : sum(sizes[: me + 1])])
        return torch.cat(parts)
    if kind == "gather":
        return inputs if me == root else None
    if kind == "scatter":
        return values(me, seed + root, count, dtype)
    if kind == "ring":
        return inputs[me - 1]
    return None


def alike(a, b):
    if isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a is b is None or (a is not None and torch.equal(a, b) and a.dtype == b.dtype)


KINDS = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "ring",
    "barrier",
]
STEP = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 50),
    COUNTS,
    st.sampled_from(DTYPES),
    st.sampled_from(list(OPS)),
    st.integers(0, 7),
    st.booleans(),
)


class Programs(RuleBasedStateMachine):
    pool = None
    names = 0

    @initialize()
    def start(self):
        self.groups = {}

    @precondition(lambda self: len(self.groups) < 4)
    @rule(data=st.data())
    def make(self, data):
        members = data.draw(st.lists(st.integers(0, self.pool.world_size - 1), min_size=1, unique=True), "members")
        Programs.names += 1
        name = f"g{Programs.names}"
        # torch's new_group sorts what it is given.
        self.groups[name] = sorted(members)
        self.pool.run(new_group_case, name, self.groups[name])

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), steps=st.lists(STEP, min_size=1, max_size=12))
    def run(self, data, steps):
        name = data.draw(st.sampled_from(sorted(self.groups)), "group")
        members = self.groups[name]
        n = len(members)
        steps = [
            (kind, seed, count, dtype, op, root % n, asynchronous)
            for kind, seed, count, dtype, op, root, asynchronous in steps
            if not (kind == "ring" and n == 1)
        ]
        got = self.pool.run(program_case, name, members, steps)
        for me, rank in enumerate(members):
            for index, step in enumerate(steps):
                want = expected(me, n, *step)
                assert alike(got[rank][index], want), (
                    f"rank {rank}, step {index} {step}: {got[rank][index]} is not {want}"
                )

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def drop(self, data):
        name = data.draw(st.sampled_from(sorted(self.groups)), "group")
        del self.groups[name]
        self.pool.run(drop_group_case, name)

    def teardown(self):
        for name in self.groups:
            self.pool.run(drop_group_case, name)


@pytest.mark.world_sizes(4)
@pytest.mark.timeout(1800)
def test_random_programs(ranks, full):
    Programs.pool = ranks
    run_state_machine_as_test(
        Programs,
        settings=settings(
            max_examples=300 if full else 8 if ranks.layout else 15,
            stateful_step_count=12,
            deadline=None,
            derandomize=not full,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
