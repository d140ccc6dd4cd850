"""all_reduce of sparse COO tensors, as gloo offers it (DDP reduces sparse embedding gradients so).

Every rank gathers every rank's coordinates and values and adds them up in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import dtypes
from ..errors import UsageError

if TYPE_CHECKING:
    from ..call import Call
    from .collectives import Lowering


def sizes(lower: Lowering, tensor: torch.Tensor, op: Any, seconds: float) -> Call:
    """The call that tells every rank how many entries each rank has. Checks the arguments."""
    if dtypes.split_op(op)[0] != int(dtypes.RedOp.SUM):
        raise UsageError("all_reduce: sparse tensors can only be reduced with SUM")
    mine = torch.tensor([tensor.coalesce()._nnz()])
    return lower.all_gather_single(torch.empty(lower.size, dtype=torch.int64), mine, seconds)


def exchange(
    lower: Lowering, tensor: torch.Tensor, sizes_call: Call, seconds: float
) -> tuple[list[Call], Callable[[], None]]:
    """(calls, finish) for the payload, once ``sizes_call`` has run. ``finish`` writes the sum into
    ``tensor``."""
    entries = [int(cast(torch.Tensor, part)) for part in sizes_call.outputs]
    mine = tensor.coalesce()
    indices, values = mine.indices(), mine.values()
    all_indices = [indices.new_empty((indices.size(0), n)) for n in entries]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in entries]
    calls = [lower.all_gather(all_indices, indices, seconds), lower.all_gather(all_values, values, seconds)]

    def finish() -> None:
        # Indices that came from a peer: outside of the shape they would be used as they are.
        parts = [
            torch.sparse_coo_tensor(i, v, tensor.shape, check_invariants=True) for i, v in zip(all_indices, all_values)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        tensor.copy_(total.coalesce())

    return calls, finish
