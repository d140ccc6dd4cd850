"""The package, the torch that it is to work with, and the native core: what of it this processor gets."""

from __future__ import annotations

import os
import platform
from importlib.metadata import entry_points
from typing import Any

from .._version import TESTED_TORCH, __version__, described, revision
from .finding import Finding, State

_ENTRY_POINTS = (("torch.backends", "c10d_custom"), ("torch.distributed.backends", "custom"))


def package() -> Finding:
    """Finds out whether torch finds this package without an import of it."""
    missing = [group for group, name in _ENTRY_POINTS if not any(e.name == name for e in entry_points(group=group))]
    off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
    facts: dict[str, Any] = {
        "c10d_custom": __version__,
        "revision": revision(),
        "python": platform.python_version(),
        "missing_entry_points": missing,
        "autoload": not off,
    }
    what = f"c10d-custom {described()}, Python {platform.python_version()}"
    if missing:
        said = "torch does not find it by itself, as it is not installed by pip: write `import c10d_custom`"
    elif off:
        said = (
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0: a torch before 2.14 does not find it by itself, and nothing is replaced "
            "or taken from an MPI launcher before it is imported: write `import c10d_custom`"
        )
    else:
        return Finding("package", f"{what}; torch finds it by itself", facts=facts)
    return Finding("package", f"{what}; {said}", State.REMARK, facts)


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def torch() -> Finding:
    """Finds torch's version, and whether the tests have run on it."""
    first, last = TESTED_TORCH
    facts: dict[str, Any] = {"tested": list(TESTED_TORCH), "torch": None}
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return Finding("torch", f"cannot be imported: {error}", State.FAILS, facts)
    facts["torch"] = version = str(torch.__version__)
    if not dist.is_available():
        return Finding("torch", f"{version} was built without torch.distributed", State.FAILS, facts)
    try:
        here = _minor(version)
    except ValueError:
        return Finding("torch", f"{version}: not a release that was tested ({first} to {last})", State.REMARK, facts)
    if here < _minor(first):
        return Finding("torch", f"{version} is older than {first}, the first that this works with", State.FAILS, facts)
    if here > _minor(last):
        text = f"{version} is newer than what was tested ({first} to {last}): what it has moved is off, with a warning"
        return Finding("torch", text, State.REMARK, facts)
    return Finding("torch", f"{version}, among those tested ({first} to {last})", facts=facts)


def core() -> Finding:
    """Whether it loads, and which build of the reductions it chose."""
    cores = len(os.sched_getaffinity(0))
    facts: dict[str, Any] = {"machine": platform.machine(), "cores": cores, "reductions": None}
    try:
        from .. import native
    except Exception as error:
        text = f"the native core does not load ({error}): reinstall c10d-custom"
        return Finding("core", text, State.FAILS, facts)
    facts["reductions"] = variant = native.lib.c10d_reduce_variant().decode()
    text = f"reductions built for {_meaning(variant)}; {cores} core{'s' * (cores != 1)} for this process"
    if platform.machine() != "x86_64":
        return Finding("core", f"{text}; on {platform.machine()} it has not been tested", State.REMARK, facts)
    return Finding("core", text, facts=facts)


def _meaning(variant: str) -> str:
    known = {
        "x86-64-v4": "x86-64-v4 (AVX-512)",
        "x86-64-v3": "x86-64-v3 (AVX2)",
        "baseline": f"any {platform.machine()} (baseline)",
    }
    return known.get(variant, variant)
