"""A few bytes that the ranks of a host tell each other amid a call on CUDA tensors, through the CPU transport, whose
waits have deadlines and see the dead."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from ... import dtypes
from ...call import Call, Op, Region

if TYPE_CHECKING:
    from .. import LocalTransport


BYTES = dtypes.BY_DTYPE[torch.uint8]


def tell(cpu: LocalTransport, name: str, seconds: float, mine: bytes) -> list[bytes]:
    """Every rank's bytes, as many on all ranks. ``name``: for errors. One of the group's collectives: raises as
    `run`."""
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
