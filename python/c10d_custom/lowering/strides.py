"""Which elements of a strided tensor share memory: as an output it could not hold what a collective gives."""

from __future__ import annotations

import torch

from ..errors import UsageError


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of ``t`` lie in one place, as those of an expanded tensor do."""
    dims = sorted((stride, size) for stride, size in zip(t.stride(), t.size()) if size > 1)
    if not dims or not t.numel():
        return False
    reach, nested = 0, True  # of the dimensions so far: from their first element to the last
    for stride, size in dims:
        if stride == 0:
            return True
        nested &= stride > reach
        reach += stride * (size - 1)
    if nested:
        return False
    if reach < t.numel() - 1:
        return True
    # Dimensions that run into each other (as_strided makes such) may still miss each other everywhere.
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = (places.unsqueeze(1) + torch.arange(size, device="cpu") * stride).view(-1)
    taken = torch.zeros(reach + 1, dtype=torch.bool, device="cpu")
    taken[places] = True
    return int(taken.sum()) < t.numel()


def require_room(name: str, t: torch.Tensor, what: str) -> None:
    """For an output. Raises UsageError where not each element has a place of its own."""
    if overlaps_itself(t):
        raise UsageError(
            f"{name}: {what} has elements that share memory (sizes {list(t.size())}, strides {list(t.stride())}), as "
            "an expanded tensor's do, and cannot take a result: give a clone() of it"
        )
