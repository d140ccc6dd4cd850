"""What figures depend on beside the code: recorded with them."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .._version import __version__

# Settings that change figures.
_SETTINGS = ("C10D_CUSTOM_", "OMPI_MCA_", "MPIR_CVAR_", "UCX_", "FI_", "GLOO_", "OMP_NUM_THREADS")


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cpu() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _caches() -> dict[str, str | None]:
    """{"L1d": "48K", ...} of the first core."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_read(index / "type") or "", "")
        caches[f"L{_read(index / 'level')}{kind}"] = _read(index / "size")
    return caches


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def about() -> dict[str, Any]:
    """Returns what figures of this process, on this host, depend on."""
    return {
        "torch": torch.__version__,
        "c10d_custom": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "caches": _caches(),
        "memory": _memory_bytes(),
        "cpu_limit": _read("/sys/fs/cgroup/cpu.max"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_huge_pages": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv[1:],
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)},
    }
