"""Every operation by many more ranks than cores, at small sizes: the bits of one process's computation in rank order.

Each rank says what bits it got, as a digest; the parent knows all inputs and computes what each must have got, once:
ranks that did it all would take most of the time. Between cores that ranks share, a call takes milliseconds, so cases
are few: the ways that small calls go, just below and above where they change.
"""

import hashlib
import re

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveMismatchError
from harness import Layout, RankPool

from . import reference, values

pytestmark = pytest.mark.lane2

REDUCTIONS = (  # dtype, op, kind
    (torch.float32, "SUM", "rough"),
    (torch.bfloat16, "SUM", "rough"),
    (torch.float16, "AVG", "rough"),
    (torch.int64, "BXOR", "rough"),
    (torch.int8, "MAX", "rough"),
    (torch.complex64, "PREMUL_SUM", "rough"),
)
BYTES = 4, 60, 4096, 5000, 16384, 20000  # of a rank's input
IN_FLIGHT = 16


def _digest(tensor):
    return hashlib.blake2b(values.raw(tensor).numpy().tobytes(), digest_size=8).hexdigest()


def _case(turn):
    """What the operations of one turn are of: (dtype, op, kind, count)"""
    dtype, op, kind = REDUCTIONS[turn % len(REDUCTIONS)]
    return dtype, op, kind, max(1, BYTES[turn % len(BYTES)] // dtype.itemsize)


def _input(dtype, rank, kind, op, count, start=0):
    return values.inputs(dtype, rank, kind, op, count, start)


def _turn(turn):
    """On every rank: {what: digest of what this rank got}, None where it gets nothing."""
    n, me = dist.get_world_size(), dist.get_rank()
    dtype, op, kind, count = _case(turn)
    root, part = turn * 7 % n, max(1, count // n)
    reduce_op = values.reduce_op(op, kind)
    got = {}

    def keep(what, tensor):
        got[what] = None if tensor is None else _digest(tensor)

    def mine(elements=count):
        return _input(dtype, me, kind, op, elements)

    dist.barrier()
    dist.all_reduce(tensor := mine(), reduce_op)
    keep("all_reduce", tensor)
    dist.reduce(tensor := mine(), root, reduce_op)
    keep("reduce", tensor if me == root else None)
    dist.broadcast(tensor := mine(), root)
    keep("broadcast", tensor)
    dist.all_gather_into_tensor(tensor := torch.zeros(n * part, dtype=dtype), mine(part))
    keep("all_gather", tensor)
    dist.reduce_scatter_tensor(tensor := torch.zeros(part, dtype=dtype), mine(n * part), reduce_op)
    keep("reduce_scatter", tensor)
    dist.all_to_all_single(tensor := torch.zeros(n * part, dtype=dtype), mine(n * part))
    keep("all_to_all", tensor)
    parts = [torch.zeros(part, dtype=dtype) for _ in range(n)] if me == root else None
    dist.gather(mine(part), parts, root)
    keep("gather", torch.cat(parts) if me == root else None)
    dist.scatter(tensor := torch.zeros(part, dtype=dtype), list(mine(n * part).chunk(n)) if me == root else None, root)
    keep("scatter", tensor)
    # Parts that differ: rank r gives rank s one element, or two where r + s is a multiple of three.
    give = [1 + ((me + s) % 3 == 0) for s in range(n)]
    dist.all_to_all_single(tensor := torch.zeros(sum(give), dtype=dtype), mine(sum(give)), give, give)
    keep("uneven all_to_all", tensor)
    tensors = [_input(dtype, me, kind, op, part, start=i) for i in range(IN_FLIGHT)]
    for work in [dist.all_reduce(t, reduce_op, async_op=True) for t in tensors]:
        work.wait()
    keep("in flight", torch.cat(tensors))
    ahead = dist.isend(mine(), (me + 1) % n)
    dist.recv(tensor := torch.zeros(count, dtype=dtype), (me - 1) % n)
    ahead.wait()
    keep("ring", tensor)
    return got


def _wanted(turn, n):
    """The same of each rank, by one process."""
    dtype, op, kind, count = _case(turn)
    root, part = turn * 7 % n, max(1, count // n)
    longest = max(count, n * part, 2 * n, part + IN_FLIGHT)
    inputs = [_input(dtype, rank, kind, op, longest) for rank in range(n)]
    reduced = reference.reduced(dtype, op, range(n), kind, longest)
    gathered = torch.cat([each[:part] for each in inputs])
    in_flight = torch.cat([reduced[i : i + part] for i in range(IN_FLIGHT)])
    give = [[1 + ((r + s) % 3 == 0) for s in range(n)] for r in range(n)]
    begin = [[sum(of[:s]) for s in range(n)] for of in give]

    def of_rank(me):
        cut = slice(me * part, (me + 1) * part)
        uneven = [inputs[r][begin[r][me] : begin[r][me] + give[r][me]] for r in range(n)]
        return {
            "all_reduce": reduced[:count],
            "reduce": reduced[:count] if me == root else None,
            "broadcast": inputs[root][:count],
            "all_gather": gathered,
            "reduce_scatter": reduced[cut],
            "all_to_all": torch.cat([each[cut] for each in inputs]),
            "gather": gathered if me == root else None,
            "scatter": inputs[root][cut],
            "uneven all_to_all": torch.cat(uneven),
            "in flight": in_flight,
            "ring": inputs[(me - 1) % n][:count],
        }

    return [{what: None if t is None else _digest(t) for what, t in of_rank(me).items()} for me in range(n)]


def _one_calls_another_count():
    group = dist.new_group()
    tensor = torch.ones(9 if dist.get_rank() == 11 else 8)
    try:
        dist.all_reduce(tensor, group=group)
    except CollectiveMismatchError as error:
        return str(error), tensor.tolist() == [1.0] * tensor.numel()
    return "it succeeded", False


def _limit_of_threads():
    torch.set_num_threads(1)


@pytest.mark.timeout(0)  # the pool has its own
@pytest.mark.skipif(Layout.chosen() is not None, reason="of one host")
@pytest.mark.parametrize(
    "size",
    [
        48,
        *(
            pytest.param(n, marks=pytest.mark.full("minutes, and gigabytes: ranks by the hundred"))
            for n in (64, 128, 256)
        ),
    ],
)
def test_every_operation(size, backend):
    if backend != "custom":
        pytest.skip("gloo's own ranks would take hours")
    pool = RankPool(size, backend, group_timeout=300.0)
    try:
        pool.run(_limit_of_threads, timeout=300)
        wrong = []
        for turn in range(len(REDUCTIONS)) if size > 48 else (0, 2, 5):
            wanted = _wanted(turn, size)
            for rank, got in enumerate(pool.run(_turn, turn, timeout=300)):
                wrong += [f"turn {turn}, rank {rank}: {what}" for what in got if got[what] != wanted[rank][what]]
        assert not wrong, "\n".join(wrong[:50])
        for rank, (error, untouched) in enumerate(pool.run(_one_calls_another_count, timeout=300)):
            assert "they differ in count" in error and untouched, (rank, error)
            assert re.search(r"rank 11: .*float32\[9\]", error), (rank, error)
        assert (problem := pool.close()) is None, problem
    finally:
        pool.discard()
