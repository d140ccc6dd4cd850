"""CUDA as the transport uses it: its driver API by NVIDIA's binding, kernels.py, and torch.

The binding takes less than 1 us a call, and lets go of the GIL in each (cuda-bindings 12.9.1, 13.0 and newer), so that
one that blocks (opening another process's memory, freeing, anything behind a wait on the GPU) holds up its own thread
only; cupy's has few of these functions, and does not always. Nothing here waits for the GPU on purpose; who must, asks
`done` until its deadline.

Memory, streams and events are plain integers: an address, a cudaStream_t (which is a CUstream), a cudaEvent_t. Any
thread, inside `activate`.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import functools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...call import copy_back
from ...errors import TransportError, UsageError
from ...extras import how_to_install
from ...threads import threading
from .kernels import Kernels
from .mappings import HANDLE_BYTES, Allocation, Mappings

# Below so many bytes cuMemcpyAsync writes to the GPU by an engine that takes turns with the kernels of other processes;
# seen on an H200: at 16 KiB it does, at 32 KiB not. Two rows always go by the copy engine.
_BY_ROWS = 64 << 10


class Driver:
    """One GPU. ``uuid``: the same for all processes that see it; ``process``: the PID of this process, in which nothing
    can be opened that it has exported itself; ``identity``: a number that no other Driver has, of any process at any
    time; ``mappings``: what of other processes is open here; ``side_by_side``: whether it runs kernels of different
    processes at once. Where CUDA reports an error, which may be that of earlier work, TransportError is raised."""

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy  # noqa: F401 - for kernels.py
            from cuda.bindings import driver as cuda
        except ImportError as error:
            extra = f"cuda{(torch.version.cuda or '13').split('.')[0]}"
            needed = f"tensors on {device} need cupy and cuda-bindings: {how_to_install(extra)} ({error})"
            raise UsageError(needed) from error
        self._cuda: Any = cuda
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self.uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        self.process = os.getpid()
        self.identity = int.from_bytes(os.urandom(8), "little")
        self.mappings = Mappings(self)
        try:
            self._do(self._cuda.cuInit, 0)
        except RuntimeError as error:  # the binding's: there is no libcuda
            raise TransportError(f"CUDA's driver: {error}") from error
        number = self._do(self._cuda.cuDeviceGet, self.device.index)
        # That of CUDA's runtime, torch's too; it stays until the process ends.
        self._context = self._do(self._cuda.cuDevicePrimaryCtxRetain, number)
        # A driver that cannot tell: False.
        status, by_mps = cuda.cuDeviceGetAttribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED, number)
        self.side_by_side = not status and by_mps != 0
        self._events: tuple[deque[int], deque[int]] = deque(), deque()  # that are free: without time, with it
        self._after: list[int] = []  # streams of which `after` takes one that is idle
        self._lock = threading.RLock()

    def _do(self, function: Any, *arguments: Any) -> Any:
        """What a call gives: nothing, one thing, or several."""
        got = function(*arguments)
        if got[0]:
            raise TransportError(f"CUDA: {function.__name__}: {self._text(got[0])}")
        return got[1] if len(got) == 2 else got[1:]

    def _text(self, status: Any) -> str:
        _, meaning = self._cuda.cuGetErrorString(status)
        return f"{status.name}: {(meaning or b'').decode(errors='replace')}"

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """A context in which this is the calling thread's device, and what it calls spoils no capture of a graph."""
        self._do(self._cuda.cuCtxPushCurrent, self._context)
        try:
            relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            before = self._do(self._cuda.cuThreadExchangeStreamCaptureMode, relaxed)
            try:
                yield
            finally:
                self._do(self._cuda.cuThreadExchangeStreamCaptureMode, before)
        finally:
            self._do(self._cuda.cuCtxPopCurrent)

    def now(self) -> float:
        """Of a clock by which work on the GPU is timed."""
        return time.monotonic()

    def visible(self) -> int:
        """How many GPUs this process sees."""
        return torch.cuda.device_count()

    # --- memory

    def allocate(self, nbytes: int) -> int:
        """Address of memory that can be exported (torch's allocator may hand out some that cannot)."""
        status, address = self._cuda.cuMemAlloc(nbytes)
        if status:  # some may lie unused with torch
            torch.cuda.empty_cache()
            address = self._do(self._cuda.cuMemAlloc, nbytes)
        return int(address)

    def free(self, address: int) -> None:
        self._do(self._cuda.cuMemFree, address)

    def allocate_pinned(self, nbytes: int) -> int:
        """Address of host memory that copies run at full speed from and to."""
        return int(self._do(self._cuda.cuMemHostAlloc, nbytes, self._cuda.CU_MEMHOSTALLOC_PORTABLE))

    def free_pinned(self, address: int) -> None:
        self._do(self._cuda.cuMemFreeHost, address)

    def allocation_of(self, address: int) -> Allocation | None:
        """The one that an address lies in; None if there is none, or none that can be exported."""
        said = self._cuda.CUpointer_attribute
        number = 0
        for attribute in (said.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, said.CU_POINTER_ATTRIBUTE_BUFFER_ID):
            status, number = self._cuda.cuPointerGetAttribute(attribute, address)
            if status or not number:
                return None
        base, nbytes = self._do(self._cuda.cuMemGetAddressRange, address)
        return Allocation(int(base), nbytes, number)

    def export_memory(self, address: int) -> bytes:
        """The bytes by which another process opens an allocation, which begins there."""
        handle = self._do(self._cuda.cuIpcGetMemHandle, address)
        return c.string_at(handle.getPtr(), HANDLE_BYTES)

    def open_memory(self, handle: bytes) -> int:
        what = self._cuda.CUipcMemHandle()
        c.memmove(what.getPtr(), handle, HANDLE_BYTES)
        flag = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._do(self._cuda.cuIpcOpenMemHandle, what, flag))

    def close_memory(self, address: int) -> None:
        self._do(self._cuda.cuIpcCloseMemHandle, address)

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """Bytes, which keep ``owner`` as long as there are any."""
        import cupy

        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self.device.index)
        made = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        return torch.from_dlpack(made)

    # --- streams and events

    def create_stream(self, highest: bool = False) -> int:
        """A stream that nobody else has (torch's own are handed out again after 32, and to the user, too), of the
        highest priority, or of one between that, which is left to the user, and the default."""
        _, greatest = self._do(self._cuda.cuCtxGetStreamPriorityRange)  # a negative number
        priority = greatest if highest else min(0, greatest + 1)
        flag = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._do(self._cuda.cuStreamCreateWithPriority, flag, priority))

    def destroy_stream(self, stream: int) -> None:
        self._do(self._cuda.cuStreamDestroy, stream)

    def current_stream(self) -> int:
        """The calling thread's, of this device."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def capturing(self) -> bool:
        """True while the current stream is captured into a graph."""
        return bool(self._do(self._cuda.cuStreamIsCapturing, self.current_stream()))

    def take_event(self, timed: bool = False) -> int:
        """One to be given back. They serve again and again: a wait captures what is recorded when it is called."""
        try:
            return self._events[timed].popleft()
        except IndexError:
            flags = self._cuda.CUevent_flags
            flag = flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING
            return int(self._do(self._cuda.cuEventCreate, flag))

    def give_event(self, event: int, timed: bool = False) -> None:
        """Anywhere: who has it may be collected amid `take_event`, too, where each step on the deque is whole."""
        self._events[timed].append(event)

    def milliseconds(self, start: int, end: int) -> float:
        """Between two timed events, which are over."""
        return float(self._do(self._cuda.cuEventElapsedTime, start, end))

    def record(self, event: int, stream: int) -> None:
        self._do(self._cuda.cuEventRecord, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """``stream`` waits for what was recorded last, by the time of this call."""
        self._do(self._cuda.cuStreamWaitEvent, stream, event, 0)

    def done(self, event: int) -> bool:
        return self._past("cuEventQuery", event)

    def _past(self, name: str, what: int) -> bool:
        (status,) = getattr(self._cuda, name)(what)
        if status and status != self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            raise TransportError(f"CUDA: {self._text(status)}, in work queued on this device before")
        return not status

    # --- work

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Between any two memories, pinned host memory too."""
        self._do(self._cuda.cuMemcpyAsync, target, source, nbytes, stream)

    def copy_in(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """From pinned host memory to this GPU; a few bytes, too, without waiting for other processes' kernels."""
        if nbytes >= _BY_ROWS:
            return self.copy(stream, target, source, nbytes)
        if nbytes < 2:
            return self._copy_rows(stream, target, source, nbytes, 1) if nbytes else None
        self._copy_rows(stream, target, source, nbytes // 2, 2)
        if nbytes % 2:
            self._copy_rows(stream, target + nbytes - 2, source + nbytes - 2, 1, 2)
        return None

    def _copy_rows(self, stream: int, target: int, source: int, width: int, rows: int) -> None:
        what = self._cuda.CUDA_MEMCPY2D()
        what.srcMemoryType = self._cuda.CUmemorytype.CU_MEMORYTYPE_HOST
        what.srcHost, what.srcPitch = source, width
        what.dstMemoryType = self._cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        what.dstDevice, what.dstPitch = target, width
        what.WidthInBytes, what.Height = width, rows
        self._do(self._cuda.cuMemcpy2DAsync, what, stream)

    def load(self, function: int) -> None:
        """Puts a kernel's code on the GPU. Where CUDA loads lazily and nobody asks, its first launch does, which a
        capture spoils, and which waits for kernels that run, such as wait for this one. Older drivers cannot."""
        try:
            self._do(self._cuda.cuFuncLoad, function)
        except TransportError:
            raise
        except RuntimeError:  # the binding's: there is no such function
            pass

    def zero(self, stream: int, address: int, nbytes: int) -> None:
        self._do(self._cuda.cuMemsetD8Async, address, 0, nbytes, stream)

    @functools.cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.device.index, self.load)

    def _on(self, stream: int) -> AbstractContextManager[Any]:
        if stream == self.current_stream():
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device))

    def copy_tensors(self, stream: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """[(destination, plain source)], on a stream of `create_stream` or the current one, as call.copy_back."""
        with self._on(stream):
            copy_back(pairs)

    def future(self, devices: list[torch.device]) -> torch.futures.Future[Any]:
        """A future of tensors on these devices."""
        return torch.futures.Future(devices=[*devices])

    @contextlib.contextmanager
    def after(self, events: Sequence[int]) -> Iterator[None]:
        """A context in which the current stream of this device is one that comes after these events, and nothing else;
        they may be another device's of this process. What a future is given there, its waiters come after."""
        with self._lock:
            found = next((s for s in self._after if self._past("cuStreamQuery", s)), None)
            if found is not None:
                self._after.remove(found)
        stream = self.create_stream() if found is None else found
        try:
            for event in events:
                self.wait(stream, event)
            with self._on(stream):
                yield
        finally:
            with self._lock:
                self._after.append(stream)


@functools.cache
def driver_of(device: torch.device) -> Driver:
    """This process's Driver of a torch.device."""
    return Driver(device)
