"""Tensors whose memory is not their elements in order: plain ones that stand in for them, and which of them can hold
what a collective gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import UsageError

if TYPE_CHECKING:
    from ..call import Call, Message


def is_plain(t: torch.Tensor) -> bool:
    """True if the tensor's bytes, in order, are its elements."""
    return t.is_contiguous() and not t.is_neg() and not t.is_conj()


def source(t: torch.Tensor) -> torch.Tensor:
    """``t``, or a plain copy of it."""
    return t if is_plain(t) else t.resolve_conj().resolve_neg().contiguous()


def target(t: torch.Tensor, call: Call | Message, what: str = "tensor") -> torch.Tensor:
    """``t``, or a plain tensor whose contents go to ``t`` at the end."""
    if is_plain(t):
        return t
    _require_room(call.name, t, what)
    plain = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    call.copy_back.append((t, plain))
    return plain


def target_with_input(t: torch.Tensor, call: Call) -> torch.Tensor:
    """The same for an operation that reads ``t``, too: one plain tensor for both."""
    plain = target(t, call)
    return plain if plain is t else plain.copy_(t.detach())


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


def _require_room(name: str, t: torch.Tensor, what: str) -> None:
    """For an output. Raises UsageError where not each element has a place of its own."""
    if overlaps_itself(t):
        raise UsageError(
            f"{name}: {what} has elements that share memory (sizes {list(t.size())}, strides {list(t.stride())}), as "
            "an expanded tensor's do, and cannot take a result: give a clone() of it"
        )
