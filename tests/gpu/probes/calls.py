"""What the probes ask of CUDA, through cupy's thin calls and cuda.bindings. To be imported in a probe's processes."""

import ctypes
import time

import cupy
from cupy.cuda import runtime

SPIN = r"""
extern "C" __global__ void spin(long long cycles, volatile unsigned* out, unsigned value) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
    if (out) *out = value;
}
"""


class Gpu:
    """One non-blocking stream on device 0, and a kernel that takes its time and then writes a word."""

    def __init__(self):
        cupy.cuda.Device(0).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._spin = cupy.RawKernel(SPIN, "spin")
        self.spin(0.0)
        self.stream.synchronize()
        began = time.monotonic()
        self._launch(100_000_000, 0, 0)
        self.stream.synchronize()
        self._rate = 100_000_000 / (time.monotonic() - began)

    def _launch(self, cycles, address, value):
        with self.stream:
            self._spin((1,), (1,), (cupy.int64(cycles), cupy.uint64(address), cupy.uint32(value)))

    def spin(self, seconds, address=0, value=0):
        """Queue: be busy for so long, then write value at address."""
        self._launch(int(seconds * getattr(self, "_rate", 0)), address, value)

    def allocate(self, size=4096):
        address = runtime.malloc(size)
        runtime.memset(address, 0, size)
        runtime.deviceSynchronize()
        return address

    def read(self, address):
        """The word there, once what is queued on the stream is over."""
        word = ctypes.c_uint32()
        runtime.memcpyAsync(ctypes.addressof(word), address, 4, runtime.memcpyDeviceToHost, self.stream.ptr)
        self.stream.synchronize()
        return word.value

    def write(self, address, value):
        word = ctypes.c_uint32(value)
        runtime.memcpy(address, ctypes.addressof(word), 4, runtime.memcpyHostToDevice)


def interprocess_event():
    return runtime.eventCreateWithFlags(runtime.eventInterprocess | runtime.eventDisableTiming)


def driver(result):
    """cuda.bindings.driver's answer, or RuntimeError."""
    code, *values = result if isinstance(result, tuple) else (result,)
    if int(code):
        raise RuntimeError(f"{code!r}")
    return values[0] if len(values) == 1 else values


def median_us(times):
    return sorted(times)[len(times) // 2] * 1e6
