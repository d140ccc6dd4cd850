"""CUDA as the transport uses it, and the one file that calls it.

Memory, streams and events are plain integers: an address, a cudaStream_t, a cudaEvent_t. Nothing here waits
for the GPU; who must, asks `done` until its deadline. Any thread, inside `activate`. cupy and
cuda.bindings are imported when the first driver is made.
"""

import contextlib
import functools
import os
from abc import ABC, abstractmethod

import torch

from ...errors import TransportError, UsageError

_NOT_READY = 600  # cudaErrorNotReady


class Driver(ABC):
    """One GPU. ``device``: its torch.device; ``uuid``: the same for all processes that see it; ``process``: this
    process, in which nothing can be opened that it has exported itself."""

    device = None
    uuid = None
    process = None

    @abstractmethod
    def activate(self):
        """A context in which this is the calling thread's device."""

    # --- memory

    @abstractmethod
    def allocate(self, nbytes):
        """Address of memory that can be exported (torch's allocator may hand out some that cannot)."""

    @abstractmethod
    def free(self, address):
        pass

    @abstractmethod
    def export_memory(self, address):
        """The bytes by which another process opens what `allocate` gave."""

    @abstractmethod
    def open_memory(self, handle):
        pass

    @abstractmethod
    def close_memory(self, address):
        pass

    @abstractmethod
    def allocate_pinned(self, nbytes):
        """Address of host memory that copies run at full speed from and to."""

    @abstractmethod
    def free_pinned(self, address):
        pass

    # --- streams and events

    @abstractmethod
    def create_stream(self):
        """A stream of high priority. Streams are torch's, which keeps them for good."""

    @abstractmethod
    def current_stream(self):
        """The calling thread's, of this device."""

    @abstractmethod
    def capturing(self):
        """True while the current stream is captured into a graph."""

    @abstractmethod
    def allow_captures(self):
        """What the calling thread calls from now on does not spoil another thread's capture."""

    @abstractmethod
    def create_event(self, shared=False):
        """``shared``: can be exported."""

    @abstractmethod
    def destroy_event(self, event):
        """Also of one that `open_event` gave."""

    @abstractmethod
    def export_event(self, event):
        pass

    @abstractmethod
    def open_event(self, handle):
        pass

    @abstractmethod
    def record(self, event, stream):
        pass

    @abstractmethod
    def wait(self, stream, event):
        """``stream`` waits for what was recorded last, by the time of this call."""

    @abstractmethod
    def done(self, event):
        pass

    @abstractmethod
    def write_value(self, stream, address, value):
        """A stream memory operation: writes 32 bits."""

    @abstractmethod
    def wait_value(self, stream, address, value):
        """``stream`` waits until the 32 bits at ``address`` are ``value`` or beyond (cyclically)."""

    # --- work

    @abstractmethod
    def copy(self, stream, target, source, nbytes):
        """Between any two memories, pinned host memory too."""

    @abstractmethod
    def zero(self, stream, address, nbytes):
        pass

    @abstractmethod
    def kernels(self):
        """The kernels.Kernels of this GPU."""

    @abstractmethod
    def reduce(self, stream, dtype, redop, factor, sources, targets, count):
        """See kernels.Kernels.reduce."""

    @abstractmethod
    def copy_tensors(self, stream, pairs):
        """[(destination, plain source)], on a stream of `create_stream` or the current one."""

    @abstractmethod
    def future(self):
        """A torch.futures.Future of tensors on this device."""

    @abstractmethod
    def resolve(self, future, value, events):
        """``value``, for streams that come after ``events``."""


class CudaDriver(Driver):
    def __init__(self, device):
        try:
            import cupy
        except ImportError as error:
            raise UsageError(f"tensors on {device} need cupy: pip install 'c10d-custom[cuda]' ({error})") from error
        self._runtime = cupy.cuda.runtime
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self.uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        self.process = os.getpid()
        self._streams = {}
        self._kernels = None

    @contextlib.contextmanager
    def activate(self):
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

    def allocate(self, nbytes):
        return self._runtime.malloc(nbytes)

    def free(self, address):
        self._runtime.free(address)

    def export_memory(self, address):
        return bytes(self._runtime.ipcGetMemHandle(address))

    def open_memory(self, handle):
        return self._runtime.ipcOpenMemHandle(handle)

    def close_memory(self, address):
        self._runtime.ipcCloseMemHandle(address)

    def allocate_pinned(self, nbytes):
        return self._runtime.hostAlloc(nbytes, self._runtime.hostAllocPortable)

    def free_pinned(self, address):
        self._runtime.freeHost(address)

    # --- streams and events

    def create_stream(self):
        stream = torch.cuda.Stream(self.device, priority=-1)
        self._streams[stream.cuda_stream] = stream
        return stream.cuda_stream

    def current_stream(self):
        return torch.cuda.current_stream(self.device).cuda_stream

    def capturing(self):
        return torch.cuda.is_current_stream_capturing()

    def allow_captures(self):
        from cuda.bindings import driver

        _checked(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))

    def create_event(self, shared=False):
        flags = self._runtime.eventDisableTiming | (self._runtime.eventInterprocess if shared else 0)
        return self._runtime.eventCreateWithFlags(flags)

    def destroy_event(self, event):
        self._runtime.eventDestroy(event)

    def export_event(self, event):
        return bytes(self._runtime.ipcGetEventHandle(event))

    def open_event(self, handle):
        return self._runtime.ipcOpenEventHandle(handle)

    def record(self, event, stream):
        self._runtime.eventRecord(event, stream)

    def wait(self, stream, event):
        self._runtime.streamWaitEvent(stream, event, 0)

    def done(self, event):
        status = self._runtime.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise TransportError(f"{self.device}: CUDA error {status} in work queued on this device")
        return status == 0

    def write_value(self, stream, address, value):
        from cuda.bindings import driver

        _checked(driver.cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0))

    def wait_value(self, stream, address, value):
        from cuda.bindings import driver

        flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        _checked(driver.cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, int(flags)))

    # --- work

    def copy(self, stream, target, source, nbytes):
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream)

    def zero(self, stream, address, nbytes):
        self._runtime.memsetAsync(address, 0, nbytes, stream)

    def kernels(self):
        if self._kernels is None:
            from .kernels import Kernels

            self._kernels = Kernels(self.device.index)
        return self._kernels

    def reduce(self, stream, dtype, redop, factor, sources, targets, count):
        self.kernels().reduce(stream, dtype, redop, factor, sources, targets, count)

    def copy_tensors(self, stream, pairs):
        with torch.cuda.stream(self._streams.get(stream)):  # None: the current one
            for destination, plain in pairs:
                destination.copy_(plain.view(destination.shape))

    def future(self):
        return torch.futures.Future(devices=[self.device])

    def resolve(self, future, value, events):
        # What set_result finds current is what the future's waiters and callbacks come after.
        after = torch.cuda.Stream(self.device)
        for event in events:
            self.wait(after.cuda_stream, event)
        with torch.cuda.stream(after):
            future.set_result(value)


def _checked(result):
    if result[0].value:
        raise TransportError(f"CUDA's driver: {result[0].name}")


@functools.cache
def driver_of(device):
    """This process's Driver of a torch.device."""
    return CudaDriver(device)
