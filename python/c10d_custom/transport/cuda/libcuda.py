"""CUDA's driver API, called by ctypes: without the GIL, so that a call that blocks (opening another process's memory,
freeing, anything behind a wait on the GPU) holds up its own thread only.

Handles are integers, those of CUDA's runtime as well: a cudaStream_t is a CUstream. The calling thread must have a
context current (`Libcuda.pushed`).
"""

from __future__ import annotations

import contextlib
import ctypes as c
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...errors import TransportError

_OUT_OF_MEMORY, _NOT_READY = 2, 600  # CUDA_ERROR_...
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_EVENT_DISABLE_TIMING = 2
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_BUFFER_ID, _IPC_CAPABLE = 7, 10  # CU_POINTER_ATTRIBUTE_..., that of cuIpcGetMemHandle
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_...
_MPS = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
HANDLE_BYTES = 64
# Below so many bytes cuMemcpyAsync writes to the GPU by an engine that takes turns with the kernels of other processes;
# seen on an H200: at 16 KiB it does, at 32 KiB not. Two rows always go by the copy engine.
_BY_ROWS = 64 << 10


class OutOfMemoryError(TransportError):
    """There is no more memory on the GPU, or of the host's that can be pinned."""


class Handle(c.Structure):
    """CUipcMemHandle, which calls take by value."""

    _fields_ = [("reserved", c.c_char * HANDLE_BYTES)]


class Allocation(NamedTuple):
    """Memory as it was allocated: all of it is exported as one. ``number``: no other one of the process ever has it."""

    base: int
    nbytes: int
    number: int


class Memcpy2D(c.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", c.c_size_t),
            ("Y", c.c_size_t),
            ("MemoryType", c.c_uint),
            ("Host", c.c_void_p),
            ("Device", c.c_uint64),
            ("Array", c.c_void_p),
            ("Pitch", c.c_size_t),
        )
    ] + [("WidthInBytes", c.c_size_t), ("Height", c.c_size_t)]


_INT, _UINT, _SIZE, _ADDRESS, _POINTER = c.c_int, c.c_uint, c.c_size_t, c.c_uint64, c.c_void_p

# By the names that libcuda.so exports, the types of cuda.h (CUdeviceptr: _ADDRESS; enums: _UINT).
CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetAttribute": (_POINTER, _UINT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (_POINTER,),
    "cuCtxGetStreamPriorityRange": (_POINTER, _POINTER),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (_POINTER, _SIZE, _UINT),
    "cuMemFreeHost": (_POINTER,),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _ADDRESS),
    "cuPointerGetAttribute": (_POINTER, _UINT, _ADDRESS),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_POINTER, Handle, _UINT),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuStreamCreateWithPriority": (_POINTER, _UINT, _INT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamQuery": (_POINTER,),
    "cuStreamIsCapturing": (_POINTER, _POINTER),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _UINT),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventDestroy_v2": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventElapsedTime": (_POINTER, _POINTER, _POINTER),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpy2DAsync_v2": (_POINTER, _POINTER),
    "cuMemsetD8Async": (_ADDRESS, c.c_ubyte, _SIZE, _POINTER),
    "cuGetErrorName": (_INT, _POINTER),
    "cuGetErrorString": (_INT, _POINTER),
}
NEWER: dict[str, tuple[Any, ...]] = {"cuFuncLoad": (_POINTER,)}  # of 12.4


class Libcuda:
    """Every call but a query raises TransportError where CUDA reports an error, which may be that of earlier work."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            library = c.CDLL(path)
            self._calls = {name: getattr(library, name) for name in CALLS}
        except (OSError, AttributeError) as error:
            raise TransportError(f"CUDA's driver: {error}") from error
        self._calls |= {name: getattr(library, name) for name in NEWER if hasattr(library, name)}
        for name, call in self._calls.items():
            call.argtypes = (CALLS | NEWER)[name]
        self._do("cuInit", 0)

    def _do(self, name: str, *arguments: Any) -> None:
        if status := self._calls[name](*arguments):
            kind = OutOfMemoryError if status == _OUT_OF_MEMORY else TransportError
            raise kind(f"CUDA: {name}: {self.text(status)}")

    def _get(self, kind: Any, name: str, *arguments: Any) -> Any:
        """What a call leaves where its first argument points."""
        out = kind()
        self._do(name, c.byref(out), *arguments)
        return out.value

    def text(self, status: int) -> str:
        said = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c.c_char_p()
            if self._calls[name](status, c.byref(text)) == 0 and text.value:
                said.append(text.value.decode(errors="replace"))
        return ": ".join(said) or f"error {status}"

    # --- contexts and threads

    def primary_context(self, index: int) -> int:
        """The context that CUDA's runtime uses, torch's too; it stays until the process ends."""
        device = self._get(c.c_int, "cuDeviceGet", index)
        return self._get(c.c_void_p, "cuDevicePrimaryCtxRetain", device)

    def runs_side_by_side(self, index: int) -> bool:
        """Whether kernels of different processes run at once there, by MPS. A driver that cannot tell: False."""
        out, device = c.c_int(), self._get(c.c_int, "cuDeviceGet", index)
        return self._calls["cuDeviceGetAttribute"](c.byref(out), _MPS, device) == 0 and out.value != 0

    @contextlib.contextmanager
    def pushed(self, context: int) -> Iterator[None]:
        """The calling thread's calls are for ``context``, and spoil no capture of any thread."""
        self._do("cuCtxPushCurrent_v2", context)
        try:
            mode = c.c_int(_RELAXED)
            self._do("cuThreadExchangeStreamCaptureMode", c.byref(mode))  # which leaves the one before there
            try:
                yield
            finally:
                self._do("cuThreadExchangeStreamCaptureMode", c.byref(mode))
        finally:
            popped = c.c_void_p()
            self._do("cuCtxPopCurrent_v2", c.byref(popped))

    # --- memory

    def allocate(self, nbytes: int) -> int:
        """Address of memory that can be exported (torch's allocator may hand out some that cannot)."""
        return self._get(c.c_uint64, "cuMemAlloc_v2", nbytes)

    def free(self, address: int) -> None:
        self._do("cuMemFree_v2", address)

    def allocate_pinned(self, nbytes: int) -> int:
        """Address of host memory that copies run at full speed from and to."""
        return self._get(c.c_void_p, "cuMemHostAlloc", nbytes, _PORTABLE)

    def free_pinned(self, address: int) -> None:
        self._do("cuMemFreeHost", address)

    def allocation_of(self, address: int) -> Allocation | None:
        """The one that an address lies in; None if there is none, or none that can be exported."""
        number = c.c_uint64()
        for attribute in (_IPC_CAPABLE, _BUFFER_ID):  # of the first, CUDA writes less
            if self._calls["cuPointerGetAttribute"](c.byref(number), attribute, address) or not number.value:
                return None
        base, nbytes = c.c_uint64(), c.c_size_t()
        self._do("cuMemGetAddressRange_v2", c.byref(base), c.byref(nbytes), address)
        return Allocation(base.value, nbytes.value, number.value)

    def export_memory(self, address: int) -> bytes:
        """The bytes by which another process opens an allocation, which begins there."""
        handle = Handle()
        self._do("cuIpcGetMemHandle", c.byref(handle), address)
        return bytes(handle)

    def open_memory(self, handle: bytes) -> int:
        return self._get(c.c_uint64, "cuIpcOpenMemHandle_v2", Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def close_memory(self, address: int) -> None:
        self._do("cuIpcCloseMemHandle", address)

    # --- streams and events

    def create_stream(self, highest: bool = False) -> int:
        """A stream that nobody else has (torch's own are handed out again after 32, and to the user, too), of the
        highest priority, or of one between that, which is left to the user, and the default."""
        least, greatest = c.c_int(), c.c_int()  # 0, and a negative number
        self._do("cuCtxGetStreamPriorityRange", c.byref(least), c.byref(greatest))
        priority = greatest.value if highest else min(0, greatest.value + 1)
        return self._get(c.c_void_p, "cuStreamCreateWithPriority", _NON_BLOCKING, priority)

    def destroy_stream(self, stream: int) -> None:
        self._do("cuStreamDestroy_v2", stream)

    def idle(self, stream: int) -> bool:
        return self._past("cuStreamQuery", stream)

    def captured(self, stream: int) -> bool:
        out = c.c_int()
        self._do("cuStreamIsCapturing", stream, c.byref(out))
        return out.value != 0

    def create_event(self, timed: bool = False) -> int:
        return self._get(c.c_void_p, "cuEventCreate", 0 if timed else _EVENT_DISABLE_TIMING)

    def milliseconds(self, start: int, end: int) -> float:
        """Between two timed events, which are over."""
        return self._get(c.c_float, "cuEventElapsedTime", start, end)

    def destroy_event(self, event: int) -> None:
        self._do("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        self._do("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """``stream`` waits for what was recorded last, by the time of this call."""
        self._do("cuStreamWaitEvent", stream, event, 0)

    def done(self, event: int) -> bool:
        return self._past("cuEventQuery", event)

    def _past(self, name: str, what: int) -> bool:
        status = self._calls[name](what)
        if status not in (0, _NOT_READY):
            raise TransportError(f"CUDA: {self.text(status)}, in work queued on this device before")
        return status == 0

    # --- work

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Between any two memories, pinned host memory too."""
        self._do("cuMemcpyAsync", target, source, nbytes, stream)

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
        what = Memcpy2D(srcMemoryType=_HOST, srcHost=source, srcPitch=width, WidthInBytes=width, Height=rows)
        what.dstMemoryType, what.dstDevice, what.dstPitch = _DEVICE, target, width
        self._do("cuMemcpy2DAsync_v2", c.byref(what), stream)

    def load(self, function: int) -> None:
        """Puts a kernel's code on the GPU. Where CUDA loads lazily and nobody asks, its first launch does, which a
        capture spoils, and which waits for kernels that run, such as wait for this one. Older drivers cannot."""
        if "cuFuncLoad" in self._calls:
            self._do("cuFuncLoad", function)

    def zero(self, stream: int, address: int, nbytes: int) -> None:
        self._do("cuMemsetD8Async", address, 0, nbytes, stream)
