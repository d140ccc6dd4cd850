"""The CUDA kernels' source text, and NVRTC, which makes machine code of it.

NVRTC is called directly: cupy's RawModule appends -ftz=true to all options, which would flush subnormal
numbers to zero. The text includes no header of CUDA's or the host's, so that nothing but NVRTC's library
need be installed; it comes with torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ... import dtypes
from ...errors import TransportError

# In the order in which they build on each other.
FILES = ("device.h", "formats.h", "operations.h", "instances.h", "vectors.h", "reduce.h", "p2p.h")
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")


def folder() -> Path:
    """Where the sources lie: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for path in (package / "native" / "cuda", package.parents[1] / "backend" / "cuda"):
        if (path / FILES[0]).is_file():
            return path
    raise TransportError(f"the CUDA sources are missing from {package}: reinstall c10d-custom")


def name_of(algorithm: str, dtype: dtypes.DType, redop: int) -> str:
    """The kernel's name. Raises UsageError where the reduce op has no meaning for the DType."""
    dtypes.check_reduce(dtype, redop)
    return f"c10d_{algorithm}_{dtype.name}_{dtypes.REDUCE_OPS[redop]}"


def text_of(instances: Iterable[tuple[str, dtypes.DType, int]], files: Iterable[Path] = ()) -> str:
    """One translation unit with these kernels: (algorithm, DType, code of a reduce op) each. ``files`` gives
    the paths of files that take the place of those of the same name."""
    instead = {path.name: path for path in files}
    parts = []
    for name in FILES:
        path = instead.get(name, folder() / name)
        lines = [
            "" if line.startswith(('#include "', "#pragma once")) else line for line in path.read_text().splitlines()
        ]
        parts += [f'#line 1 "{name}"', *lines]
    parts.append('#line 1 "instances"')
    for algorithm, dtype, redop in instances:
        name_of(algorithm, dtype, redop)
        parts.append(f"C10D_INSTANCE({algorithm}, {dtype.name}, {dtypes.REDUCE_OPS[redop]})")
    return "\n".join(parts) + "\n"


def compile_text(text: str, capability: str) -> bytes:
    """The machine code of a translation unit for GPUs of a compute capability, "90" say; PTX, which the
    driver translates, where NVRTC is older than the GPU."""
    from cuda.bindings import nvrtc

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise TransportError(f"NVRTC: {function.__name__} failed: {status.name}")
        return results[0] if results else None

    known = call(nvrtc.nvrtcGetSupportedArchs)
    own = int(capability) in known
    arch = f"sm_{capability}" if own else f"compute_{max(a for a in known if a <= int(capability))}"
    program = call(nvrtc.nvrtcCreateProgram, text.encode(), b"c10d_custom.cu", 0, [], [])
    try:
        options = [o.encode() for o in (*OPTIONS, f"--gpu-architecture={arch}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * call(nvrtc.nvrtcGetProgramLogSize, program)
            call(nvrtc.nvrtcGetProgramLog, program, log)
            text = log.rstrip(b" " + bytes(1)).decode()
            raise TransportError(f"the CUDA kernels did not compile for {arch}:\n{text}")
        size, get = (
            (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if own else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        code = b" " * call(size, program)
        call(get, program, code)
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compiled(text: str, capability: str) -> bytes:
    """compile_text, remembered on disk beside what cupy compiles, where that folder can be written."""
    from cuda.bindings import nvrtc

    cache = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    key = repr((text, OPTIONS, capability, nvrtc.nvrtcVersion())).encode()
    path = cache / f"c10d_custom_{hashlib.sha256(key).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = compile_text(text, capability)
    with contextlib.suppress(OSError):  # then it is compiled again next time
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as part:
            (Path(part) / path.name).write_bytes(code)
            os.replace(Path(part) / path.name, path)
    return code
