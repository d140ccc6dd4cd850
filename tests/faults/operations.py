"""Every collective of a group, each as one call whose arguments a test can vary, on tensors that lie between guards.

Calls go to the group's own methods, with an options object: that is where dist's functions end, and where a time-out
of the call can be given.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

_GUARD = 64  # bytes before and behind each tensor

SMALL, LONG = 12, 60_000  # elements: with the announcement, and through the rings


class Arena:
    """Makes tensors, and tells whether anything has been written to them or near them."""

    def __init__(self):
        self._blocks = []

    def tensor(self, count, dtype):
        size = count * dtype.itemsize
        whole = torch.full((size + 2 * _GUARD,), 0xA5, dtype=torch.uint8)
        whole[_GUARD : _GUARD + size] = (torch.arange(size) % 83 + len(self._blocks)).to(torch.uint8)
        self._blocks.append((whole, whole.clone()))
        return whole[_GUARD : _GUARD + size].view(dtype)

    def written(self):
        """What has been: "guards" or "contents" of each tensor that is not as it was made."""
        found = []
        for now, before in self._blocks:
            if not torch.equal(now, before):
                inside = slice(_GUARD, len(now) - _GUARD)
                found.append(
                    "contents"
                    if torch.equal(now[:_GUARD], before[:_GUARD])
                    and torch.equal(now[inside.stop :], before[inside.stop :])
                    else "guards"
                )
        return found


@dataclass
class Asked:
    """``extra``: elements more, in one part of what is moved where ranks may have parts of different sizes."""

    count: int = SMALL
    dtype: torch.dtype = torch.float32
    redop: object = field(default_factory=lambda: ReduceOp.SUM)
    root: int = 0
    extra: int = 0
    seconds: float | None = None
    asynchronous: bool = False


def _options(kind, asked):
    options = kind()
    options.asyncOp = asked.asynchronous
    if asked.seconds is not None:
        options.timeout = timedelta(seconds=asked.seconds)
    for name, value in (("reduceOp", asked.redop), ("rootRank", asked.root)):
        if hasattr(options, name):
            setattr(options, name, value)
    return options


def _parts(arena, n, asked):
    """One tensor for each rank, the last of which is the one that `extra` makes longer."""
    return [arena.tensor(asked.count + (asked.extra if r == n - 1 else 0), asked.dtype) for r in range(n)]


def _own(g, arena, asked):
    return arena.tensor(asked.count + (asked.extra if g.rank() == g.size() - 1 else 0), asked.dtype)


def broadcast(g, arena, a):
    return g.broadcast([arena.tensor(a.count, a.dtype)], _options(BroadcastOptions, a))


def all_reduce(g, arena, a):
    return g.allreduce([arena.tensor(a.count, a.dtype)], _options(AllreduceOptions, a))


def all_reduce_coalesced(g, arena, a):
    tensors = [arena.tensor(n, a.dtype) for n in (a.count, 3)]
    return g.allreduce_coalesced(tensors, _options(AllreduceCoalescedOptions, a))


def sparse_all_reduce(g, arena, a):
    values = arena.tensor(a.count, a.dtype)
    tensor = torch.sparse_coo_tensor(torch.arange(a.count)[None], values, (a.count,), check_invariants=False)
    return g.allreduce([tensor], _options(AllreduceOptions, a))


def reduce(g, arena, a):
    return g.reduce([arena.tensor(a.count, a.dtype)], _options(ReduceOptions, a))


def all_gather(g, arena, a):
    return g.allgather([_parts(arena, g.size(), a)], [_own(g, arena, a)], _options(AllgatherOptions, a))


def all_gather_coalesced(g, arena, a):
    outputs = [[part, arena.tensor(3, a.dtype)] for part in _parts(arena, g.size(), a)]
    return g.allgather_coalesced(outputs, [_own(g, arena, a), arena.tensor(3, a.dtype)], _options(AllgatherOptions, a))


def all_gather_single(g, arena, a):
    return g.all_gather_single(
        arena.tensor(g.size() * a.count, a.dtype), arena.tensor(a.count, a.dtype), _options(AllgatherOptions, a)
    )


def all_gather_single_coalesced(g, arena, a):
    outputs = [arena.tensor(g.size() * n, a.dtype) for n in (a.count, 3)]
    return g.all_gather_single_coalesced(
        outputs, [arena.tensor(n, a.dtype) for n in (a.count, 3)], _options(AllgatherOptions, a)
    )


def gather(g, arena, a):
    outputs = [_parts(arena, g.size(), a)] if g.rank() == a.root else []
    return g.gather(outputs, [arena.tensor(a.count, a.dtype)], _options(GatherOptions, a))


def scatter(g, arena, a):
    inputs = [_parts(arena, g.size(), a)] if g.rank() == a.root else []
    return g.scatter([arena.tensor(a.count, a.dtype)], inputs, _options(ScatterOptions, a))


def reduce_scatter(g, arena, a):
    return g.reduce_scatter([_own(g, arena, a)], [_parts(arena, g.size(), a)], _options(ReduceScatterOptions, a))


def reduce_scatter_single(g, arena, a):
    return g.reduce_scatter_single(
        arena.tensor(a.count, a.dtype), arena.tensor(g.size() * a.count, a.dtype), _options(ReduceScatterOptions, a)
    )


def reduce_scatter_single_coalesced(g, arena, a):
    outputs = [arena.tensor(n, a.dtype) for n in (a.count, 3)]
    return g.reduce_scatter_single_coalesced(
        outputs, [arena.tensor(g.size() * n, a.dtype) for n in (a.count, 3)], _options(ReduceScatterOptions, a)
    )


def all_to_all(g, arena, a):
    parts = [arena.tensor(a.count, a.dtype) for _ in range(2 * g.size())]
    return g.alltoall(parts[: g.size()], parts[g.size() :], _options(AllToAllOptions, a))


def all_to_all_single(g, arena, a):
    """Uneven: `extra` more go to the rank after this one."""
    n, to = g.size(), (g.rank() + 1) % g.size()
    splits = [a.count + (a.extra if r == to else 0) for r in range(n)]
    return g.all_to_all_single(
        arena.tensor(n * a.count, a.dtype),
        arena.tensor(sum(splits), a.dtype),
        [a.count] * n,
        splits,
        _options(AllToAllOptions, a),
    )


def barrier(g, arena, a):
    return g.barrier(_options(BarrierOptions, a))


# name -> (call, the fields of Asked in which ranks must not differ)
REDUCING = "count", "dtype", "redop"
COLLECTIVES = {
    "broadcast": (broadcast, ("count", "dtype", "root")),
    "all_reduce": (all_reduce, REDUCING),
    "all_reduce_coalesced": (all_reduce_coalesced, REDUCING),
    "sparse_all_reduce": (sparse_all_reduce, ("dtype",)),
    "reduce": (reduce, (*REDUCING, "root")),
    "all_gather": (all_gather, ("count", "dtype", "extra")),
    "all_gather_coalesced": (all_gather_coalesced, ("count", "dtype", "extra")),
    "all_gather_single": (all_gather_single, ("count", "dtype")),
    "all_gather_single_coalesced": (all_gather_single_coalesced, ("count", "dtype")),
    "gather": (gather, ("count", "dtype", "root")),
    "scatter": (scatter, ("count", "dtype", "root")),
    "reduce_scatter": (reduce_scatter, (*REDUCING, "extra")),
    "reduce_scatter_single": (reduce_scatter_single, REDUCING),
    "reduce_scatter_single_coalesced": (reduce_scatter_single_coalesced, REDUCING),
    "all_to_all": (all_to_all, ("count", "dtype")),
    "all_to_all_single": (all_to_all_single, ("count", "dtype", "extra")),
    "barrier": (barrier, ()),
}


def wait_for_future(work):
    """As its wait(), by its future, whose error is a RuntimeError that quotes the Work's own: that one is raised."""
    try:
        work.get_future().wait()
    except RuntimeError as error:
        own = work.exception()
        assert f"{type(own).__name__}: {own}" in str(error), error
        raise own from None
