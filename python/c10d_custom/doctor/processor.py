"""The native core, and what of it this processor gets."""

from __future__ import annotations

import os
import platform
from typing import Any

from .finding import Finding, State


def core() -> Finding:
    """Whether it loads, which build of the reductions it chose, and by what Python calls it."""
    cores = len(os.sched_getaffinity(0))
    facts: dict[str, Any] = {"machine": platform.machine(), "cores": cores, "reductions": None, "calls": None}
    try:
        from .. import native
    except Exception as error:
        text = f"the native core does not load ({error}): reinstall c10d-custom"
        return Finding("core", text, State.FAILS, facts)
    facts["reductions"] = variant = native.lib.c10d_reduce_variant().decode()
    extension = native.inside is not native.lib.c10d_inside
    facts["calls"] = "extension" if extension else "ctypes"
    text = f"reductions built for {_meaning(variant)}; {cores} core{'s' * (cores != 1)} for this process"
    if platform.machine() != "x86_64":
        return Finding("core", f"{text}; on {platform.machine()} it has not been tested", State.REMARK, facts)
    if not extension:
        text += (
            "; called by ctypes, which takes a little longer: the extension c10d_custom.native._fast does not load in "
            f"this Python ({platform.python_implementation()} {platform.python_version()})"
        )
        return Finding("core", text, State.REMARK, facts)
    return Finding("core", f"{text}; called through the extension", facts=facts)


def _meaning(variant: str) -> str:
    known = {
        "x86-64-v4": "x86-64-v4 (AVX-512)",
        "x86-64-v3": "x86-64-v3 (AVX2)",
        "baseline": f"any {platform.machine()} (baseline)",
    }
    return known.get(variant, variant)
