"""Messages of plain CPU tensors, from c10d's arguments to the core in one call. In C where that was built
(backend/python/fast.c), else here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from ..dtypes import PACKED
from . import RECEIVED, address_of, lib
from .fast_collective import InPython, fast_collective
from .raw_tensor import raw_tensor
from .torch_inside import nobody_watches

OVER, POSTED, NOT_BEGUN = range(3)  # the first as base.FastMessage says


def _in_python(
    handle: Any,
    ranks: int,
    tensors: Any,
    is_recv: bool,
    peer: Any,
    tag: Any,
    nanoseconds: int,
    wait: int,
    posted: list[Any],
) -> int:
    """Posts a message of the only one of ``tensors`` and waits up to ``wait`` ns for its end. OVER; or POSTED, and the
    ticket's address is in the list ``posted``, unless the group is closed; or NOT_BEGUN, as it is no plain CPU tensor
    with elements, or no such peer, or somebody watches torch's dispatcher."""
    found = raw_tensor(tensors[0]) if len(tensors) == 1 and nobody_watches() else None
    if not found or not found[1] or not (isinstance(peer, int) and isinstance(tag, int) and 0 <= peer < ranks):
        return NOT_BEGUN
    address, count, code = found
    kind = PACKED[code] | RECEIVED if is_recv else PACKED[code]
    at = ctypes.c_void_p()
    try:
        status = lib.c10d_message(handle, kind, peer, tag, address, count, nanoseconds, wait, ctypes.byref(at))
        return POSTED if status else OVER
    finally:
        if at.value:
            posted.append(at.value)


def fast_message(handle: Any, ranks: int) -> Callable[..., int]:
    """The function above, of one group."""
    if fast_collective is InPython:
        return partial(_in_python, handle, ranks)
    from ._fast import message  # where there is the other, there is this

    return partial(message, address_of(lib.c10d_message), handle, ranks)
