"""What to install for a part of the package that an extra brings, as errors say it: no index has the package, so its
extras can be asked for only where its source, or its wheel, is."""

from __future__ import annotations

# As setup.cfg has them.
PACKAGES = {
    "mpi": ("mpi4py>=4", "mpich"),
    "cuda12": ("cupy-cuda12x>=14", "cuda-bindings>=12.9.1,<13"),
    "cuda13": ("cupy-cuda13x>=14", "cuda-bindings>=13,<14"),
}


def how_to_install(extra: str) -> str:
    if extra not in PACKAGES:  # of a CUDA that is newer or older
        return f"pip install cupy-{extra}x cuda-bindings"
    packages = " ".join(f'"{p}"' if set(p) & set("<>") else p for p in PACKAGES[extra])
    return f'pip install ".[{extra}]" in a checkout of c10d-custom, or pip install {packages}'
