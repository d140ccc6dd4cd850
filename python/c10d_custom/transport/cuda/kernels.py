"""The CUDA kernels of one device: compiled when first asked for, launched on raw streams."""

from __future__ import annotations

import ctypes as c
import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ... import dtypes
from ...dtypes import DType
from ...errors import UsageError
from ...threads import threading
from . import compiler

MAX_SOURCES, MAX_PLACES, MAX_JOBS = 64, 272, 16
PREMUL_SUM = int(dtypes.RedOp.PREMUL_SUM)
COPY = int(dtypes.RedOp.BOR)  # of a single source: its bits
_THREADS = 256
_BLOCKS_PER_PROCESSOR = 4


class Job(NamedTuple):
    """Every target gets the reduction of the sources: addresses of ``items`` elements each."""

    sources: Sequence[int]
    targets: Sequence[int]
    items: int


class JobArguments(c.Structure):
    """Reduce::Job of backend/cuda/reduce.h."""

    _fields_ = [
        ("bytes", c.c_uint64),
        *((name, c.c_uint32) for name in ("first", "sources", "targets", "unit", "skew")),
    ]


class ReduceArguments(c.Structure):
    """Reduce::Arguments of backend/cuda/reduce.h."""

    _fields_ = [
        ("place", c.c_uint64 * MAX_PLACES),
        ("factor", c.c_double * MAX_SOURCES),
        ("job", JobArguments * MAX_JOBS),
        ("jobs", c.c_uint32),
    ]


def alignment(addresses: Sequence[int], item_bytes: int) -> tuple[int, int]:
    """(unit, skew) as Reduce::Arguments has them."""
    skew = addresses[0] % 16
    if skew % item_bytes == 0 and all(a % 16 == skew for a in addresses):
        return 16, skew
    bits = functools.reduce(operator.or_, addresses)
    return min(bits & -bits, 8), 0


class Kernels:
    """Addresses are integers, streams raw cudaStream_t ones; all belong to ``device``, an index. A launch
    returns when it is enqueued. ``load``: puts a kernel's code on the GPU, of whose handle it is told. Any thread may
    call."""

    def __init__(self, device: int, load: Callable[[int], None]) -> None:
        import cupy

        self._driver, self._load_now = cupy.cuda.driver, load
        self._device = cupy.cuda.Device(device)
        self._capability = self._device.compute_capability
        self.processors = self._device.attributes["MultiProcessorCount"]
        self._functions: dict[tuple[str, int, int], int] = {}
        self._lock = threading.RLock()

    def reduce(self, stream: int, dtype: DType, redop: int, factors: Sequence[float], jobs: Sequence[Job]) -> None:
        """In each job targets[j][i] = sources[0][i] op sources[1][i] op ..., rounded once. ``dtype``: a dtypes.DType;
        ``redop``: a code of dtypes.REDUCE_OPS; ``factors``: of PREMUL_SUM, one for each source. A target may be one of
        the sources of its job, and must not overlap any other array of the call. One kernel; jobs of like length share
        the GPU best. Fast where all addresses of a job have the same remainder modulo 16."""
        for sources, targets, _ in jobs:
            if not (1 <= len(sources) <= MAX_SOURCES and len(targets) <= MAX_SOURCES):
                raise UsageError(
                    f"a CUDA reduction takes 1 to {MAX_SOURCES} sources and up to {MAX_SOURCES} targets, "
                    f"not {len(sources)} and {len(targets)}"
                )
        function = self.function("Reduce", dtype, redop)
        jobs = [j for j in jobs if j.items and j.targets]
        if not jobs:
            return
        arguments = ReduceArguments(jobs=len(jobs))
        arguments.factor[: len(factors)] = list(factors)
        first = longest = 0  # longest: Vectors of a job
        for i, (sources, targets, count) in enumerate(jobs):
            places = [*sources, *targets]
            unit, skew = alignment(places, dtype.item_bytes)
            nbytes = count * dtype.item_bytes
            arguments.place[first : first + len(places)] = places
            arguments.job[i] = JobArguments(nbytes, first, len(sources), len(targets), unit, skew)
            first += len(places)
            longest = max(longest, (skew + nbytes + 15) // 16)
        most = max(1, _BLOCKS_PER_PROCESSOR * self.processors // len(jobs))
        blocks = len(jobs) * min(-(-longest // _THREADS), most)
        self.launch(function, stream, blocks, _THREADS, arguments)

    def function(self, algorithm: str, dtype: DType, redop: int) -> int:
        """The handle of a kernel. Compiling takes some tenths of a second; after that it is a look-up."""
        key = algorithm, dtype.code, redop
        if (function := self._functions.get(key)) is None:
            with self._lock:
                if (function := self._functions.get(key)) is None:
                    function = self._functions[key] = self._load(algorithm, dtype, redop)
        return function

    def has(self, algorithm: str, dtype: DType, redop: int) -> bool:
        """Whether it is compiled."""
        return (algorithm, dtype.code, redop) in self._functions

    def launch(self, function: int, stream: int, blocks: int, threads: int, arguments: c.Structure) -> None:
        """Enqueues a kernel that takes one structure, copied before this returns."""
        parameters = (c.c_void_p * 1)(c.addressof(arguments))
        with self._device:
            self._driver.launchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, c.addressof(parameters), 0)

    def _load(self, algorithm: str, dtype: DType, redop: int) -> int:
        name = compiler.name_of(algorithm, dtype, redop)
        code = compiler.compiled(compiler.text_of([(algorithm, dtype, redop)]), self._capability)
        with self._device:
            # Stays loaded: a CUDA graph may still replay it after the group has ended.
            function: int = self._driver.moduleGetFunction(self._driver.moduleLoadData(code), name)
            self._load_now(function)
        return function
