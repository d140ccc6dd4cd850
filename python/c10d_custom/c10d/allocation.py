"""Tensors in memory that a group's collectives need not copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import UsageError
from .meeting import operations_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .issuing import Issuing


def empty(shape: int | Sequence[int], dtype: torch.dtype | None, group: ProcessGroup | None) -> torch.Tensor:
    """c10d_custom.empty."""
    found = dist.group.WORLD if group is None else group
    operations = operations_of(found) if isinstance(found, dist.ProcessGroup) else None
    if operations is None:
        raise UsageError(
            "empty: " + ("there is no default group" if found is None else 'the group is not one of the backend "custom"')
        )
    return empty_of(operations, shape, dtype)


def empty_of(operations: Issuing, shape: int | Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    """An ordinary tensor where the group has no such memory."""
    transport = operations.cpu_transport
    like = torch.empty(shape, dtype=dtype, device="meta")
    if not transport.has_arena() or not like.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = torch.frombuffer(transport.take(like.nbytes), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, like.shape, like.stride())  # type: ignore[call-overload]
