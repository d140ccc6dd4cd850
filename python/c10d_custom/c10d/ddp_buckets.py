"""DDP's buckets, moved to memory that collectives need not copy (docs/zero-copy.md).

DDP's Reducer makes a bucket, keeps views of it, and reduces it in each backward pass. Where the memory of the
bucket's storage is exchanged for some of the group's arena, all of its views see that, and the Reducer goes on as
before. Whoever has the memory's address, as numpy() of a gradient has, would not: so it is done to buckets only that
nobody but the Reducer sees, those of DistributedDataParallel without gradient_as_bucket_view."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import TransportError

_WORTH = 256 << 10  # bytes


def about_to_be_reduced(group: Any, bucket: torch.Tensor) -> list[torch.Tensor] | None:
    """A bucket is moved when it is about to be reduced for the second time. (One that has come once may be made anew in
    each pass.) Returns then what holds its former memory: the caller keeps that until this call is over, for earlier
    calls may still read there. ``group``: an Issuing."""
    if group._buckets is None:
        group._buckets = Buckets()
    return group._buckets.reduced(group, bucket)


class Buckets:
    """What is known of the buckets of one group's DDP."""

    def __init__(self) -> None:
        # Of each storage that a backward pass has reduced: whether it has been decided where it is to be.
        self._decided: dict[StorageWeakRef, bool] = {}
        # What _only_the_reducer_sees has said, which takes 70 ms; None again when a storage comes that was never seen.
        # That is enough: the storages of a new Reducer all come once before one of them comes again.
        self._private: bool | None = None
        self._on = hasattr(torch.UntypedStorage, "_swap_data_ptr_") and os.environ.get("DDP_DISABLE_COMM_MEM") != "1"

    def reduced(self, group: Any, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Does what about_to_be_reduced says, for this group."""
        if not self._on or tensor.layout is not torch.strided or tensor.dim() != 1 or tensor.nbytes < _WORTH:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or not group.cpu_transport.has_arena():
            return None
        key = StorageWeakRef(storage)
        if key not in self._decided:
            self._decided = {k: v for k, v in self._decided.items() if not k.expired()}
            self._decided[key], self._private = False, None
        elif not self._decided[key]:
            self._decided[key] = True
            if self._private is None:
                self._private = _only_the_reducer_sees(group)
            if self._private:
                return _move(group, tensor, storage)
        return None


def _only_the_reducer_sees(group: Any) -> bool:
    """Whether the buckets of all DistributedDataParallel that use this group, and there are some, are not their
    gradients as well."""
    # gc.freeze() hides what there was from the collector; modules that use the group are younger than it.
    if not any(known is group for known in gc.get_objects()):
        return False
    found = False
    for holder in gc.get_referrers(group):
        attributes = holder if isinstance(holder, dict) else vars(holder) if isinstance(holder, torch.nn.Module) else {}
        if attributes.get("process_group") is group and "gradient_as_bucket_view" in attributes:
            if attributes["gradient_as_bucket_view"]:
                return False
            found = True
    return found


def _move(group: Any, tensor: torch.Tensor, storage: torch.UntypedStorage) -> list[torch.Tensor] | None:
    try:
        buffer = group.cpu_transport.take(tensor.nbytes)
    except TransportError:  # there is not enough
        return None
    if buffer is None:
        return None
    memory = torch.frombuffer(buffer, dtype=tensor.dtype).copy_(tensor)
    storage._swap_data_ptr_(memory.untyped_storage())  # type: ignore[attr-defined]
    return [memory]
