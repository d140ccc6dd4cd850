"""Compiles every kernel for this machine's GPU, on all cores, so that what is timed later compiles nothing.

The machine code stays in the cache on disk that every rank reads. For a simulated GPU: those that most tests of it ask
for.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from c10d_custom import dtypes


def instances(algorithms):
    return [
        (algorithm, dtype.code, code)
        for algorithm in algorithms
        for dtype in dtypes.BY_DTYPE.values()
        for code, name in dtypes.REDUCE_OPS.items()
        if name in dtype.reduces
    ]


def compile_one(instance, capability):
    """Seconds."""
    from c10d_custom.transport.cuda import compiler

    dtype = next(d for d in dtypes.BY_DTYPE.values() if d.code == instance[1])
    began = time.monotonic()
    compiler.compiled(compiler.text_of([(instance[0], dtype, instance[2])]), capability)
    return time.monotonic() - began


def main(device):
    if device == "simulated":
        sys.path.append(str(Path(__file__).resolve().parents[2] / "cuda"))
        import host_gpu

        print(f"SUMMARY: for the host, {host_gpu.library().stat().st_size >> 10} KiB")
        return 0
    import cupy

    try:
        from c10d_custom.transport.cuda import compiler, p2p  # noqa: F401
    except ImportError as error:
        print(f"NOT RUN: {error}")
        return 3
    capability, began = cupy.cuda.Device(0).compute_capability, time.monotonic()
    every = instances(["Reduce", "Flagged", "OneShot", "TwoShot", "ReduceScatter"])
    every += [(algorithm, p2p.MOVED[0].code, p2p.MOVED[1]) for algorithm in ("AllGather", "Broadcast")]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        seconds = list(pool.map(compile_one, every, [capability] * len(every)))
    print(
        f"SUMMARY: {len(every)} kernels for sm_{capability} in {time.monotonic() - began:.1f} s; one takes "
        f"{sorted(seconds)[len(seconds) // 2]:.2f} s, at most {max(seconds):.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
