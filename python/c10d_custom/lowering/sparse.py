"""all_reduce of sparse COO tensors, as gloo offers it (DDP reduces sparse embedding gradients so).

Every rank gathers every rank's coordinates and values and adds them up in rank order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from .. import dtypes
from ..errors import UsageError

if TYPE_CHECKING:
    from ..call import Call
    from . import Lowering


class SparseSum:
    """One all_reduce on one rank: ``sizes`` is the call that tells every rank how many entries each rank has; once it
    has run come the calls of `payload`, and then `finish`. UsageError where the arguments make no sense."""

    def __init__(self, lower: Lowering, tensor: torch.Tensor, op: Any, seconds: float) -> None:
        if dtypes.split_op(op)[0] != int(dtypes.RedOp.SUM):
            raise UsageError("all_reduce: sparse tensors can only be reduced with SUM")
        self._lower, self._tensor, self._seconds = lower, tensor, seconds
        self._mine = tensor.coalesce()
        entries = torch.tensor([self._mine._nnz()], device="cpu")
        everyones = torch.empty(lower.size, dtype=torch.int64, device="cpu")
        self.sizes = lower.all_gather_single(everyones, entries, seconds)

    def payload(self) -> list[Call]:
        entries = [int(cast(torch.Tensor, part)) for part in self.sizes.outputs]
        indices, values = self._mine.indices(), self._mine.values()
        self._indices = [indices.new_empty((indices.size(0), n)) for n in entries]
        self._values = [values.new_empty((n, *values.shape[1:])) for n in entries]
        gather = self._lower.all_gather
        return [gather(self._indices, indices, self._seconds), gather(self._values, values, self._seconds)]

    def finish(self) -> None:
        """Writes the sum into the tensor."""
        total, *others = (self._part(i, v) for i, v in zip(self._indices, self._values))
        for part in others:
            total = total + part  # both are coalesced, so torch merges them and need not sort
        self._tensor.copy_(total.coalesce())

    def _part(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        # Indices that came from a peer: outside of the shape they would be used as they are.
        shape = self._tensor.shape
        try:
            return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=True)
        except RuntimeError:  # perhaps its owner has only said that it is coalesced
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()
