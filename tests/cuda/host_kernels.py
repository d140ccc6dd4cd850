"""Kernels whose device is the host: the sources of backend/cuda, except device.h, compiled as C++."""
import ctypes
import os
import subprocess
from pathlib import Path

from c10d_custom import dtypes
from c10d_custom.transport.cuda import compiler, kernels

HERE = Path(__file__).resolve().parent
CODES = {name: code for code, name in dtypes.REDUCE_OPS.items()}
# Every pair that reduces: (DType, code of a reduce op).
PAIRS = [(dtype, CODES[op]) for dtype in dtypes.BY_DTYPE.values() for op in dtype.reduces]


def build(path, algorithm, *flags):
    """A shared library of an algorithm's kernels for all pairs."""
    source = path.with_suffix(".cpp")
    text = compiler.text_of([(algorithm, *pair) for pair in PAIRS], [HERE / "device.h"])
    source.write_text(text + (HERE / "host_launch.cpp").read_text())
    # As the compiler of a GPU: no contraction, and a union or a cast to another type reads memory's bits.
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden",
                    "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
                    *flags, str(source), "-o", str(path)], check=True, timeout=300)
    return ctypes.CDLL(str(path))


class HostKernels(kernels.Kernels):
    def __init__(self, library, processors=3):
        self._library, self._functions, self.processors = library, {}, processors
        self._lock = kernels.threading.Lock()

    def _load(self, algorithm, dtype, redop):
        return getattr(self._library, compiler.name_of(algorithm, dtype, redop))

    def launch(self, function, stream, blocks, threads, arguments):
        assert 0 < blocks <= kernels._BLOCKS_PER_PROCESSOR * self.processors
        self._library.launch(function, ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.byref(arguments))
