"""A window of ranks that reach into each other's arenas (backend/shm/window.h)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from ctypes import byref, c_int
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ... import native
from ...call import Call, Op
from ...dtypes import BY_DTYPE, DType
from ...errors import AbortedError, TransportError
from ...native import Failure, WindowPart, lib
from ...native.direct import CoreWindow
from ...threads import time
from ..window import RemoteMemory
from . import ShmTransport, nanoseconds

if TYPE_CHECKING:
    import torch


class Part:
    """What one rank has registered: ``items`` of a dtype, and where they and the signals to it lie in its arena, as
    `place` says."""

    def __init__(self, dtype: DType, items: int, data: int, signals: int) -> None:
        self.dtype, self.items, self.data, self.signals = dtype, items, data, signals


def place(transport: ShmTransport, address: int, nbytes: int) -> int:
    """Where these bytes lie in the rank's arena; 0: elsewhere, or this process cannot reach into the others'."""
    return lib.c10d_place(transport.handle, address, nbytes)


def take_signals(transport: ShmTransport) -> tuple[Any, int]:
    """A buffer for the signals to this rank, and its place. (None, 0) where there is no such memory."""
    nbytes = lib.c10d_clear_signals(None, transport.size)
    buffer = transport.take(nbytes)
    if buffer is None:
        return None, 0
    lib.c10d_clear_signals(ctypes.addressof(buffer), transport.size)
    return buffer, place(transport, ctypes.addressof(buffer), nbytes)


class _Mapped:
    """Memory that is mapped until this goes."""

    def __init__(self, at: int, nbytes: int) -> None:
        self._at, self._nbytes = at, nbytes

    def __del__(self, unmap: Callable[..., None] = lib.c10d_unmap) -> None:
        unmap(self._at, self._nbytes)


class SharedMemory(RemoteMemory):
    """``parts``: of each rank."""

    unified = True

    def __init__(self, transport: ShmTransport, parts: Sequence[Part]) -> None:
        self._transport, self._parts = transport, parts
        given = [WindowPart(p.data, p.items, p.signals, p.dtype.code, p.dtype.item_bytes) for p in parts]
        window = lib.c10d_window_open(transport.handle, (WindowPart * len(given))(*given))
        if not window:
            raise AbortedError(f"tensor_register of group {transport.name}: {transport.ended}")
        self.fast: CoreWindow = CoreWindow(window)

    def put(self, peer: int, tensor: torch.Tensor, offset: int) -> None:
        began, code = time.monotonic(), BY_DTYPE[tensor.dtype].code
        self.check(
            "put",
            lib.c10d_window_put(self.fast.address, peer, code, tensor.data_ptr(), tensor.numel(), offset),
            peer,
            began,
        )

    def signal(self, peer: int) -> None:
        began = time.monotonic()
        self.check("signal", lib.c10d_window_signal(self.fast.address, peer), peer, began)

    def claim(self, peer: int) -> int:
        return lib.c10d_window_claim(self.fast.address, peer)

    def give_back(self, peer: int, number: int) -> None:
        lib.c10d_window_give_back(self.fast.address, peer, number)

    def await_signal(self, peer: int, number: int, seconds: float) -> bool:
        began = time.monotonic()
        status = lib.c10d_window_await(self.fast.address, peer, number, nanoseconds(seconds))
        if status != native.TIMEOUT:
            self.check("wait_signal", status, peer, began)
        return status == native.OK

    def check(self, name: str, status: int, peer: int, began: float) -> None:
        """Raises what a status of the core says of a call with ``peer`` that began then; what a signal handler has
        raised meanwhile, too."""
        if status == native.OK:
            return
        transport = self._transport
        if status == native.INTERRUPTED:
            raise transport._interruption()
        failure = Failure(status=status, peer=peer if status == native.PEER_LOST else -1, by=-1)
        if status == native.BROKEN:
            lib.c10d_health(transport.handle, native.NEVER, byref(failure))
        failure.elapsed_ns = int((time.monotonic() - began) * 1e9)
        said: Any = SimpleNamespace(name=name)
        raise transport.error(failure, said)

    def map(self, rank: int) -> Any:
        part, error = self._parts[rank], c_int()
        nbytes = part.items * part.dtype.item_bytes
        at = lib.c10d_map(self._transport.handle, rank, part.data, nbytes, byref(error))
        if not at and error.value < 0:
            raise AbortedError(f"map_remote_tensor of group {self._transport.name}: {self._transport.ended}")
        if not at:
            why = "addresses" if error.value == errno.ENOMEM else os.strerror(error.value)
            raise TransportError(f"map_remote_tensor of group {self._transport.name}: mmap of {nbytes} bytes: {why}")
        buffer: Any = (ctypes.c_char * nbytes).from_address(at)
        buffer.mapped = _Mapped(at, nbytes)
        return buffer

    def finish(self, run: Callable[[Call], None], seconds: float) -> None:
        run(Call(Op.barrier, "tensor_deregister", next(iter(BY_DTYPE.values())), seconds))
