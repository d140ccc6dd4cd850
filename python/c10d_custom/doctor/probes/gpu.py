"""The GPU as a probe sees it: the group's driver, work that takes its time, and memory of torch's allocator."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from ... import dtypes
from ...transport.cuda.answers import driver_version
from ...transport.cuda.driver import Driver, driver_of
from ...transport.cuda.kernels import Job

# One thread that counts cycles, and then writes a word.
_SPIN = r"""
struct Spin { long long cycles; volatile unsigned* word; unsigned value; };
extern "C" __global__ void spin(Spin s) {
    long long begin = clock64();
    while (clock64() - begin < s.cycles) {}
    if (s.word) *s.word = s.value;
}
"""
_CALIBRATION = 50_000_000  # cycles
_WORDS = 64  # more than a probe reads before it looks at them
_INTS = dtypes.BY_DTYPE[torch.int32]
_SUM = next(code for code, name in dtypes.REDUCE_OPS.items() if name == "SUM")


class _Spin(ctypes.Structure):
    _fields_ = [("cycles", ctypes.c_longlong), ("word", ctypes.c_uint64), ("value", ctypes.c_uint32)]


class Gpu:
    """The first one. ``large``: bytes of a copy whose speed is measured; ``rounds``: of a ping-pong."""

    large = 256 << 20
    rounds = 200

    def __init__(self) -> None:
        self.driver: Driver = driver_of(torch.device("cuda", 0))
        self._tensors: list[torch.Tensor] = []
        self._function = 0
        self._rate = 0.0  # cycles a second, once known

    def about(self) -> dict[str, str]:
        return {
            "uuid": self.driver.uuid,
            "driver": driver_version(),
            "device": torch.cuda.get_device_name(self.driver.device),
        }

    def spin(self, stream: int, seconds: float, address: int = 0, value: int = 0) -> None:
        """Enqueues: be busy for so long, then write ``value`` at ``address``."""
        if not self._rate:
            self._calibrate()
        self._launch(stream, int(seconds * self._rate), address, value)

    def _calibrate(self) -> None:
        from cupy.cuda import driver

        from ...transport.cuda import compiler

        major, minor = torch.cuda.get_device_capability(self.driver.device)
        code = compiler.compiled(_SPIN, f"{major}{minor}")
        self._function = driver.moduleGetFunction(driver.moduleLoadData(code), "spin")
        stream = self.stream()
        for cycles in (0, _CALIBRATION):
            began = time.monotonic()
            self._launch(stream, cycles, 0, 0)
            self.settle(stream)
            self._rate = cycles / (time.monotonic() - began)

    def _launch(self, stream: int, cycles: int, address: int, value: int) -> None:
        self.driver.kernels().launch(self._function, stream, 1, 1, _Spin(cycles, address, value))

    def copy_by_kernel(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self.driver.reduce(stream, _INTS, _SUM, None, [Job([source], [target], nbytes // 4)])

    def torch_memory(self, nbytes: int) -> tuple[int, int]:
        """(address, where the allocation that it lies in begins) of memory that torch's allocator gives."""
        from cuda.bindings import driver

        for _ in range(2):  # the second one does not begin its allocation
            self._tensors.append(torch.zeros(nbytes, dtype=torch.uint8, device=self.driver.device))
        torch.cuda.synchronize(self.driver.device)
        address = self._tensors[-1].data_ptr()
        code, base, _ = driver.cuMemGetAddressRange(address)
        if code.value:
            raise RuntimeError(f"cuMemGetAddressRange: {code.name}")
        return address, int(base)

    def free_torch_memory(self) -> None:
        self._tensors.clear()
        torch.cuda.empty_cache()

    # --- the same for every GPU

    def prepare(self) -> None:
        """What may not be done while something waits on a stream, as it may wait for that, too: allocating pinned
        memory, the kernel's first launch."""
        self._pinned, self._words = self.driver.allocate_pinned(64 * _WORDS), 0
        stream = self.stream()
        self.spin(stream, 0.0)
        self.settle(stream)

    def stream(self) -> int:
        return self.driver.create_stream(urgent=False)

    def settled(self, stream: int, seconds: float) -> bool:
        """Whether what is on the stream is over within so long."""
        event = self.driver.create_event()
        self.driver.record(event, stream)
        until = time.monotonic() + seconds
        while not self.driver.done(event):
            if time.monotonic() >= until:
                return False  # the event stays, as it is in use
            time.sleep(20e-6)
        self.driver.destroy_event(event)
        return True

    def settle(self, stream: int, seconds: float = 10.0) -> None:
        if not self.settled(stream, seconds):
            raise TimeoutError(f"a stream was not done after {seconds} s")

    def word(self, stream: int, address: int) -> Any:
        """Enqueues a copy of the word there: a c_uint32 in pinned memory, to be read once the stream has settled."""
        pinned = self._pinned + 64 * (self._words % _WORDS)
        self._words += 1
        self.driver.copy(stream, pinned, address, 4)
        return ctypes.c_uint32.from_address(pinned)

    def read(self, stream: int, address: int) -> int:
        word = self.word(stream, address)
        self.settle(stream)
        return int(word.value)

    def allocate_zeros(self, nbytes: int) -> int:
        address, stream = self.driver.allocate(nbytes), self.stream()
        self.driver.zero(stream, address, nbytes)
        self.settle(stream)
        return address
