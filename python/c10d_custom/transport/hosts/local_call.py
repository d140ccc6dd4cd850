"""Steps of a collective over hosts inside one of them: collectives of the native core, whose arguments are written into
memory that is kept from one to the next (the structs of ctypes take longer to make than a small one to run)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from ctypes import addressof, byref, c_char, sizeof
from itertools import chain
from typing import Any

from ...native import CallArgs, Span

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
        fields: Iterable[float],
        inputs: Iterable[tuple[int, int]],
        outputs: Iterable[tuple[int, int]],
        pipelined: int = 0,
    ) -> Any:
        """``fields``: of CallArgs, up to timeout_ns; ``inputs`` and ``outputs``: (address, bytes) of each;
        ``pipelined``: the address of a over_hosts.PipelinedReduce."""
        _ARGS.pack_into(self._memory, 0, *fields, *self._lists, pipelined)
        self._spans.pack_into(self._memory, _ARGS.size, *chain.from_iterable(inputs), *chain.from_iterable(outputs))
        return self.args
