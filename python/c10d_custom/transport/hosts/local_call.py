"""Steps of a collective over hosts inside one of them: collectives of the native core, whose arguments are written into
memory that is kept from one to the next (the structs of ctypes take longer to make than a small one to run)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from ctypes import addressof, byref, c_char, sizeof
from itertools import chain
from typing import TYPE_CHECKING, Any

from ...native import CallArgs, Span
from ...threads import time
from ..failure import LATER

if TYPE_CHECKING:
    from ...call import Call, Op
    from .layout import Step

_ARGS = struct.Struct("@IIIiQIIdQQqIIQQQ")  # CallArgs
assert _ARGS.size == sizeof(CallArgs)


class LocalCall:
    """For collectives with so many inputs and outputs. `args` is what the core takes, once `fill` has been called."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._spans = struct.Struct("@" + "QQ" * (inputs + outputs))
        self._memory = (c_char * (_ARGS.size + self._spans.size))()
        at = addressof(self._memory) + _ARGS.size
        self._lists = inputs, outputs, at, at + inputs * sizeof(Span)
        self.args: Any = byref(CallArgs.from_buffer(self._memory))

    def fill(
        self,
        of: Call,
        deadline: float,
        number: int,
        outer: int,
        op: Op,
        step: Step | None,
        root: int,
        count: int,
        inputs: Iterable[tuple[int, int]],
        outputs: Iterable[tuple[int, int]],
        pipelined: int = 0,
    ) -> Any:
        """A step of the collective ``of``, the group's ``number``: ``op`` among this host's ranks. ``step``: how it
        reduces; ``inputs`` and ``outputs``: (address, bytes) of each; ``pipelined``: the address of a
        over_hosts.PipelinedReduce; ``outer``: see CallArgs."""
        redop, factor = (step.redop, step.divisor or of.factor) if step else (0, of.factor)
        left = min(max(0, int((deadline + LATER - time.monotonic()) * 1e9)), 2**62)
        what = op, redop, of.dtype.code, root, count, of.dtype.item_bytes, 0, factor, number, outer, left
        _ARGS.pack_into(self._memory, 0, *what, *self._lists, pipelined)
        self._spans.pack_into(self._memory, _ARGS.size, *chain.from_iterable(inputs), *chain.from_iterable(outputs))
        return self.args
