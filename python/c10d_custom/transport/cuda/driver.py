"""CUDA as the transport uses it, by way of libcuda.py, kernels.py and torch.

Memory, streams and events are plain integers: an address, a cudaStream_t, a cudaEvent_t. Nothing here waits
for the GPU on purpose; who must, asks `done` until its deadline. CUDA itself may block in any call, and then holds up
the calling thread alone. Any thread, inside `activate`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ...call import copy_back
from ...errors import UsageError
from ...extras import how_to_install
from ...threads import threading
from .libcuda import Libcuda, OutOfMemoryError
from .mappings import Mappings

if TYPE_CHECKING:
    from ...dtypes import DType
    from .kernels import Job, Kernels


class Driver(Libcuda):
    """One GPU, and what libcuda.py does with it. ``uuid``: the same for all processes that see it; ``process``: the PID
    of this process, in which nothing can be opened that it has exported itself; ``identity``: a number that no other
    Driver has, of any process at any time; ``mappings``: what of other processes is open here; ``side_by_side``:
    whether it runs kernels of different processes at once. Errors of CUDA are TransportError, or cupy's."""

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy  # noqa: F401 - for kernels.py
        except ImportError as error:
            extra = f"cuda{(torch.version.cuda or '13').split('.')[0]}"
            raise UsageError(f"tensors on {device} need cupy: {how_to_install(extra)} ({error})") from error
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self.uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        self.process = os.getpid()
        self.identity = int.from_bytes(os.urandom(8), "little")
        self.mappings = Mappings(self)
        super().__init__()
        self._context = self.primary_context(self.device.index)
        self.side_by_side = self.runs_side_by_side(self.device.index)
        self._kernels: Kernels | None = None
        self._after: list[int] = []  # streams of which `after` takes one that is idle
        self._lock = threading.RLock()

    def activate(self) -> AbstractContextManager[None]:
        """A context in which this is the calling thread's device, and what it calls spoils no capture of a graph."""
        return self.pushed(self._context)

    # --- memory

    def now(self) -> float:
        """Of a clock by which work on the GPU is timed."""
        return time.monotonic()

    def visible(self) -> int:
        """How many GPUs this process sees."""
        return torch.cuda.device_count()

    def allocate(self, nbytes: int) -> int:
        try:
            return super().allocate(nbytes)
        except OutOfMemoryError:  # some may lie unused with torch
            torch.cuda.empty_cache()
            return super().allocate(nbytes)

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """Bytes, which keep ``owner`` as long as there are any."""
        import cupy

        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self.device.index)
        made = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        return torch.from_dlpack(made)

    # --- streams and events

    def current_stream(self) -> int:
        """The calling thread's, of this device."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def capturing(self) -> bool:
        """True while the current stream is captured into a graph."""
        return self.captured(self.current_stream())

    # --- work

    def kernels(self) -> Kernels:
        """The kernels.Kernels of this GPU."""
        if self._kernels is None:
            from .kernels import Kernels

            self._kernels = Kernels(self.device.index, self.load)
        return self._kernels

    def reduce(self, stream: int, dtype: DType, redop: int, factor: Any, jobs: Sequence[Job]) -> None:
        """See kernels.Kernels.reduce."""
        self.kernels().reduce(stream, dtype, redop, factor, jobs)

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
            found = next((s for s in self._after if self.idle(s)), None)
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
