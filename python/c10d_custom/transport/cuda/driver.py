"""CUDA as the transport uses it, and the one file that calls it.

Memory, streams and events are plain integers: an address, a cudaStream_t, a cudaEvent_t. Nothing here waits
for the GPU; who must, asks `done` until its deadline. Any thread, inside `activate`. cupy and
cuda.bindings are imported when the first driver is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ...errors import TransportError, UsageError
from .mappings import Allocation, Mappings

if TYPE_CHECKING:
    from ...dtypes import DType
    from .kernels import Job, Kernels


_NOT_READY = 600  # cudaErrorNotReady


class Driver(ABC):
    """One GPU. ``uuid``: the same for all processes that see it; ``process``: the PID of this process, in which nothing
    can be opened that it has exported itself; ``identity``: a number that no other Driver has, of any process at any
    time; ``mappings``: what of other processes is open here. Errors of CUDA are TransportError, or cupy's."""

    device: torch.device
    uuid: str
    process: int
    identity: int
    mappings: Mappings

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """A context in which this is the calling thread's device."""

    # --- memory

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Address of memory that can be exported (torch's allocator may hand out some that cannot)."""

    @abstractmethod
    def free(self, address: int) -> None:
        pass

    @abstractmethod
    def export_memory(self, address: int) -> bytes:
        """The bytes by which another process opens what `allocate` gave, or an Allocation's base."""

    @abstractmethod
    def allocation_of(self, address: int) -> Allocation | None:
        """The one that an address lies in, of this GPU; None if there is none, or none that can be exported."""

    @abstractmethod
    def open_memory(self, handle: bytes) -> int:
        pass

    @abstractmethod
    def close_memory(self, address: int) -> None:
        pass

    @abstractmethod
    def allocate_pinned(self, nbytes: int) -> int:
        """Address of host memory that copies run at full speed from and to."""

    @abstractmethod
    def free_pinned(self, address: int) -> None:
        pass

    # --- streams and events

    @abstractmethod
    def create_stream(self) -> int:
        """A stream of high priority. Streams are torch's, which keeps them for good."""

    @abstractmethod
    def current_stream(self) -> int:
        """The calling thread's, of this device."""

    @abstractmethod
    def capturing(self) -> bool:
        """True while the current stream is captured into a graph."""

    @abstractmethod
    def allow_captures(self) -> None:
        """What the calling thread calls from now on does not spoil another thread's capture."""

    @abstractmethod
    def create_event(self, shared: bool = False) -> int:
        """``shared``: can be exported."""

    @abstractmethod
    def destroy_event(self, event: int) -> None:
        """Also of one that `open_event` gave."""

    @abstractmethod
    def export_event(self, event: int) -> bytes:
        pass

    @abstractmethod
    def open_event(self, handle: bytes) -> int:
        pass

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        pass

    @abstractmethod
    def wait(self, stream: int, event: int) -> None:
        """``stream`` waits for what was recorded last, by the time of this call."""

    @abstractmethod
    def done(self, event: int) -> bool:
        pass

    @abstractmethod
    def write_value(self, stream: int, address: int, value: int) -> None:
        """A stream memory operation: writes 32 bits."""

    @abstractmethod
    def wait_value(self, stream: int, address: int, value: int) -> None:
        """``stream`` waits until the 32 bits at ``address`` are ``value`` or beyond (cyclically)."""

    # --- work

    @abstractmethod
    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Between any two memories, pinned host memory too."""

    @abstractmethod
    def zero(self, stream: int, address: int, nbytes: int) -> None:
        pass

    @abstractmethod
    def kernels(self) -> Kernels:
        """The kernels.Kernels of this GPU."""

    @abstractmethod
    def reduce(self, stream: int, dtype: DType, redop: int, factor: Any, jobs: Sequence[Job]) -> None:
        """See kernels.Kernels.reduce."""

    @abstractmethod
    def copy_tensors(self, stream: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """[(destination, plain source)], on a stream of `create_stream` or the current one."""

    @abstractmethod
    def future(self) -> torch.futures.Future[Any]:
        """A torch.futures.Future of tensors on this device."""

    @abstractmethod
    def resolve(self, future: torch.futures.Future[Any], value: Any, events: Sequence[int]) -> None:
        """``value``, for streams that come after ``events``."""


class CudaDriver(Driver):
    def __init__(self, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            extra = f"cuda{(torch.version.cuda or '13').split('.')[0]}"
            raise UsageError(f"tensors on {device} need cupy: pip install 'c10d-custom[{extra}]' ({error})") from error
        self._runtime = cupy.cuda.runtime
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self.uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        self.process = os.getpid()
        self.identity = int.from_bytes(os.urandom(8), "little")
        self.mappings = Mappings(self)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._kernels: Kernels | None = None

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        # cupy may have a runtime library of its own, with its own idea of the current device.
        with torch.cuda.device(self.device):
            before = self._runtime.getDevice()
            self._runtime.setDevice(self.device.index)
            try:
                yield
            finally:
                if before != self.device.index:
                    self._runtime.setDevice(before)

    # --- memory

    def allocate(self, nbytes: int) -> int:
        return self._runtime.malloc(nbytes)

    def free(self, address: int) -> None:
        self._runtime.free(address)

    def export_memory(self, address: int) -> bytes:
        return bytes(self._runtime.ipcGetMemHandle(address))

    def allocation_of(self, address: int) -> Allocation | None:
        from cuda.bindings import driver

        attribute = driver.CUpointer_attribute
        found = []
        for what in (
            attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID,
        ):
            status, value = driver.cuPointerGetAttribute(what, address)
            if status.value or not value:
                return None
            found.append(int(value))
        status, base, nbytes = driver.cuMemGetAddressRange(address)
        return None if status.value else Allocation(int(base), int(nbytes), found[1])

    def open_memory(self, handle: bytes) -> int:
        return self._runtime.ipcOpenMemHandle(handle)

    def close_memory(self, address: int) -> None:
        self._runtime.ipcCloseMemHandle(address)

    def allocate_pinned(self, nbytes: int) -> int:
        return self._runtime.hostAlloc(nbytes, self._runtime.hostAllocPortable)

    def free_pinned(self, address: int) -> None:
        self._runtime.freeHost(address)

    # --- streams and events

    def create_stream(self) -> int:
        stream = torch.cuda.Stream(self.device, priority=-1)
        self._streams[stream.cuda_stream] = stream
        return stream.cuda_stream

    def current_stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def allow_captures(self) -> None:
        from cuda.bindings import driver

        _checked(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))

    def create_event(self, shared: bool = False) -> int:
        flags = self._runtime.eventDisableTiming | (self._runtime.eventInterprocess if shared else 0)
        return self._runtime.eventCreateWithFlags(flags)

    def destroy_event(self, event: int) -> None:
        self._runtime.eventDestroy(event)

    def export_event(self, event: int) -> bytes:
        return bytes(self._runtime.ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        return self._runtime.ipcOpenEventHandle(handle)

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._runtime.streamWaitEvent(stream, event, 0)

    def done(self, event: int) -> bool:
        status = self._runtime.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise TransportError(f"{self.device}: CUDA error {status} in work queued on this device")
        return status == 0

    def write_value(self, stream: int, address: int, value: int) -> None:
        from cuda.bindings import driver

        _checked(driver.cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0))

    def wait_value(self, stream: int, address: int, value: int) -> None:
        from cuda.bindings import driver

        flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        _checked(driver.cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, int(flags)))

    # --- work

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream)

    def zero(self, stream: int, address: int, nbytes: int) -> None:
        self._runtime.memsetAsync(address, 0, nbytes, stream)

    def kernels(self) -> Kernels:
        if self._kernels is None:
            from .kernels import Kernels

            self._kernels = Kernels(self.device.index)
        return self._kernels

    def reduce(self, stream: int, dtype: DType, redop: int, factor: Any, jobs: Sequence[Job]) -> None:
        self.kernels().reduce(stream, dtype, redop, factor, jobs)

    def copy_tensors(self, stream: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.stream(self._streams.get(stream)):  # None: the current one
            for destination, plain in pairs:
                destination.copy_(plain.view(destination.shape))

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self.device])

    def resolve(self, future: torch.futures.Future[Any], value: Any, events: Sequence[int]) -> None:
        # What set_result finds current is what the future's waiters and callbacks come after.
        after = torch.cuda.Stream(self.device)
        for event in events:
            self.wait(after.cuda_stream, event)
        with torch.cuda.stream(after):
            future.set_result(value)


def _checked(result: Any) -> None:
    if result[0].value:
        raise TransportError(f"CUDA's driver: {result[0].name}")


@functools.cache
def driver_of(device: torch.device) -> CudaDriver:
    """This process's Driver of a torch.device."""
    return CudaDriver(device)
