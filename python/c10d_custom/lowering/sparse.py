"""all_reduce of sparse COO tensors, as gloo offers it (DDP reduces sparse embedding gradients so).

Every rank gathers every rank's coordinates and values and adds them up in rank order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from .. import dtypes
from ..errors import CollectiveMismatchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..call import Call
    from . import Lowering


# Sizes that a rank tells of its tensor's. Of one with more dimensions, those behind are compared by nobody.
_TOLD = 64


class SparseSum:
    """One all_reduce on one rank: ``facts`` is the call that tells every rank how many entries each rank has, and of
    which shape; once it has run, and `require_one_shape` agrees, come the calls of `payload`, and then `finish`.
    UsageError where the arguments make no sense."""

    def __init__(self, lower: Lowering, tensor: torch.Tensor, op: Any, seconds: float) -> None:
        if dtypes.split_op(op)[0] != int(dtypes.RedOp.SUM):
            raise UsageError("all_reduce: sparse tensors can only be reduced with SUM")
        self._lower, self._tensor, self._seconds = lower, tensor, seconds
        self._mine = tensor.coalesce()
        sizes = list(tensor.shape[:_TOLD])
        facts = [self._mine._nnz(), self._mine.sparse_dim(), tensor.dim(), *sizes, *[0] * (_TOLD - len(sizes))]
        everyones = torch.empty(lower.size * len(facts), dtype=torch.int64, device="cpu")
        self.facts = lower.all_gather_single(everyones, torch.tensor(facts, device="cpu"), seconds)

    def _everyones(self) -> list[list[int]]:
        return [cast(torch.Tensor, part).tolist() for part in self.facts.outputs]

    def require_one_shape(self, where: str, members: Sequence[int]) -> None:
        """CollectiveMismatchError on every rank where any has another. ``members``: group rank -> global rank."""
        shapes = [f"sizes {sizes[:dims]}, of which {sparse} sparse" for _, sparse, dims, *sizes in self._everyones()]
        if len(set(shapes)) > 1:
            own = (f"{r}{'' if members[r] == r else f' (global {members[r]})'}: {s}" for r, s in enumerate(shapes))
            raise CollectiveMismatchError(
                f"{where}: the ranks gave sparse tensors of different shapes. The group goes on:\n"
                + "\n".join(f"  rank {each}" for each in own)
            )

    def payload(self) -> list[Call]:
        entries = [facts[0] for facts in self._everyones()]
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
