"""Which synchronous collectives may go the fast path, and what c10d's options say of each.

The fast path (base.FastCollective) takes plain CPU tensors in equal parts straight to the core; of what it does not
take it has done nothing, and the slow path (issuing.py) goes on."""

from __future__ import annotations

from typing import Any

from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ..call import SHAPES, Op

# Of one operation, the type of c10d's options, and whether those have a rootRank, a reduceOp. A plain tuple, for each
# call takes it apart.
FastPath = tuple[Op, type[Any], bool, bool]


def _of(op: Op, options: type[Any]) -> FastPath:
    return op, options, SHAPES[op].rooted, SHAPES[op].reduces


BARRIER = _of(Op.barrier, BarrierOptions)
BROADCAST = _of(Op.broadcast, BroadcastOptions)
ALL_REDUCE = _of(Op.all_reduce, AllreduceOptions)
REDUCE = _of(Op.reduce, ReduceOptions)
ALL_GATHER = _of(Op.all_gather, AllgatherOptions)
REDUCE_SCATTER = _of(Op.reduce_scatter, ReduceScatterOptions)
ALL_TO_ALL = _of(Op.all_to_all, AllToAllOptions)
GATHER = _of(Op.gather, GatherOptions)
SCATTER = _of(Op.scatter, ScatterOptions)
