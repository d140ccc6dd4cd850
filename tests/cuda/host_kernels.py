"""Kernels whose device is the host: the sources of backend/cuda, except device.h, compiled as C++."""

import ctypes
import os
import subprocess
import threading
from pathlib import Path

from c10d_custom import dtypes
from c10d_custom.transport.cuda import compiler, kernels, p2p

HEADERS = "#include <memory>\n#include <thread>\n#include <typeinfo>\n#include <vector>\n"
HERE = Path(__file__).resolve().parent
CODES = {name: code for code, name in dtypes.REDUCE_OPS.items()}
# Every pair that reduces: (DType, code of a reduce op).
PAIRS = [(dtype, CODES[op]) for dtype in dtypes.BY_DTYPE.values() for op in dtype.reduces]

BY_NAME = {(d.name, dtypes.REDUCE_OPS[op]): (d, op) for d, op in PAIRS}


# The kernels of the p2p mode.
FUSED = ["OneShot", "TwoShot", "Flagged", "AllGather", "ReduceScatter", "Broadcast"]


def instances(algorithms, pairs):
    return [(a, *pair) for a in algorithms for pair in ([p2p.MOVED] if a in ("AllGather", "Broadcast") else pairs)]


def build(path, algorithms, pairs=PAIRS, files=(), flags=(), fewer=None):
    """A shared library of these algorithms' kernels for these pairs. ``files``: in place of those of the same name;
    ``fewer``: {algorithm: its pairs}, further ones."""
    wanted = instances(algorithms, pairs)
    for algorithm, some in (fewer or {}).items():
        wanted += instances([algorithm], some)
    text = compiler.text_of(wanted, [HERE / "device.h", *files])
    types = ", ".join(f"typeid(c10d_custom::dtype_{d.name}::{dtypes.REDUCE_OPS[op]}).name()" for d, op in PAIRS)
    text += f'extern "C" {{ __attribute__((visibility("default"))) const char* type_names[] = {{{types}}}; }}\n'
    text += text_of_files("host_threads.h", "host_launch.cpp")
    compile_host(path, text, "-shared", "-fPIC", "-fvisibility=hidden", *flags)
    return ctypes.CDLL(str(path))


def distinct(library, pairs):
    """One pair for each C++ type behind them: int8 and uint8, say, are added by the same code."""
    names = (ctypes.c_char_p * len(PAIRS)).in_dll(library, "type_names")
    of = dict(zip(PAIRS, names, strict=True))
    return list({of[p]: p for p in pairs}.values())


def compile_host(path, text, *flags):
    source = path.with_suffix(".cpp")
    source.write_text(HEADERS + text)
    # As the compiler of a GPU: no contraction, and a union or a cast to another type reads memory's bits.
    subprocess.run(
        [
            os.environ.get("CXX", "g++"),
            "-std=c++17",
            "-O1",
            "-pthread",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
            *flags,
            str(source),
            "-o",
            str(path),
        ],
        check=True,
        timeout=300,
    )


def text_of_files(*names):
    """Files of this folder, one after another."""
    return "".join(f'#line 1 "{name}"\n{(HERE / name).read_text()}' for name in names)


class HostKernels(kernels.Kernels):
    """Runs Reduce thread after thread, the others with real threads; launch returns when the kernel is over."""

    def __init__(self, library, processors=3):
        self._library, self._functions, self.processors = library, {}, processors
        self._lock = threading.Lock()

    def _load(self, algorithm, dtype, redop):
        run = self._library.launch if algorithm == "Reduce" else self._library.launch_threads
        return run, getattr(self._library, compiler.name_of(algorithm, dtype, redop))

    def launch(self, function, stream, blocks, threads, arguments):
        run, kernel = function
        assert blocks > 0
        run(kernel, ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.byref(arguments))
