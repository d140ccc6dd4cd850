"""What calls on CUDA tensors ask of a group's transport of CPU tensors, whose waits have deadlines and see the dead."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ... import dtypes
from ...call import Call, Message, Op, Region, changed

if TYPE_CHECKING:
    from ...config import Config
    from ...errors import CustomBackendError
    from .. import Transport
    from .driver import Driver

_Asked = TypeVar("_Asked", Call, Message)

BYTES = dtypes.BY_DTYPE[torch.uint8]


@dataclass
class Place:
    """Where a group's calls on one GPU are done. ``cpu``: its transport of CPU tensors, a LocalTransport where all its
    ranks share a host; ``stream``: of its collectives; ``late(call, what)``: the error for a GPU that takes too
    long."""

    cpu: Any
    driver: Driver
    config: Config
    stream: int
    late: Callable[[Any, str], CustomBackendError]


def for_cpu(asked: _Asked, **changes: Any) -> _Asked:
    """The same of memory of the host's."""
    return changed(asked, device=None, stream_op=None, copy_back=[], **changes)


def tell(cpu: Transport, name: str, seconds: float, mine: bytes) -> list[bytes]:
    """Every rank's bytes, as many on all ranks, amid a call. ``name``: for errors. One of the group's collectives:
    raises as `run`."""
    n, size = cpu.size, len(mine)
    own = ctypes.create_string_buffer(mine, size)
    table = ctypes.create_string_buffer(n * size)
    base = ctypes.addressof(table)
    cpu.run(
        Call(
            Op.all_gather,
            name,
            BYTES,
            seconds,
            count=size,
            inputs=[Region(ctypes.addressof(own), size, size)],
            outputs=[Region(base + r * size, size, size) for r in range(n)],
        )
    )
    return [table.raw[r * size : (r + 1) * size] for r in range(n)]
