"""Tensors in memory that a group's collectives need not copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import UsageError
from .meeting import configuration, operations_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .issuing import Issuing

_WORTH = 4 << 20  # bytes; measured with fully_shard


def empty(
    shape: int | Sequence[int],
    dtype: torch.dtype | None,
    group: ProcessGroup | None,
    device: torch.device | str | int | None,
) -> torch.Tensor:
    """c10d_custom.empty."""
    found = dist.group.WORLD if group is None else group
    operations = operations_of(found) if isinstance(found, dist.ProcessGroup) else None
    if operations is None:
        what = "there is no default group" if found is None else 'the group is not one of the backend "custom"'
        raise UsageError(f"empty: {what}")
    like = torch.empty(shape, dtype=dtype, device="meta")
    where = torch.device("cpu" if device is None else device)
    if where.type != "cpu":
        return on_gpu(operations, like.nbytes, like.dtype, where).view(like.shape)
    made = flat(operations, like.numel(), like.dtype)
    if like.dim() == 1:
        return made
    # Not a view.
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(made.untyped_storage(), 0, like.shape, like.stride())


def on_gpu(operations: Issuing, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one dimension. An ordinary one where no kernels would read it where it lies."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    made = operations.registered(device, nbytes) if nbytes else None
    return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device) if made is None else made.view(dtype)


def allocated(operations: Issuing, count: int, dtype: torch.dtype) -> torch.Tensor:
    """For who makes a tensor for each collective, as fully_shard does: a small one takes longer to make here than it
    saves."""
    if count * dtype.itemsize < _WORTH:
        return torch.empty(count, dtype=dtype, device="cpu")
    return flat(operations, count, dtype)


def flat(operations: Issuing, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one dimension. An ordinary one where the group or this process has no such memory, and where none of
    the group's collectives would read so few bytes there."""
    bytes = count * dtype.itemsize
    if bytes <= configuration().small_bytes or not operations.cpu_transport.has_arena():
        return torch.empty(count, dtype=dtype, device="cpu")
    buffer = operations.cpu_transport.take(bytes)
    if buffer is None:
        return torch.empty(count, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype, count=count)
