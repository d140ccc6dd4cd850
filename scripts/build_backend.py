"""What pip builds the package with (PEP 517): setuptools, and the compilers that setup.py takes. Where this machine has
none, the build asks for one from the package index: ziglang, which compiles C and C++ without anything of the system's.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from shutil import which
from typing import Any

from setuptools import build_meta

build_sdist, build_wheel, build_editable = build_meta.build_sdist, build_meta.build_wheel, build_meta.build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable

_KNOWN = {"CC": ("gcc", "clang", "cc"), "CXX": ("g++", "clang++", "c++")}


def _found(variable: str) -> str | None:
    """What the environment says; else the one that Python was built with, or the first known one that is there."""
    candidates = (sysconfig.get_config_var(variable), *_KNOWN[variable])
    there = (c for c in candidates if c and which(shlex.split(c)[0]))
    return os.environ.get(variable) or next(there, None)


def compilers() -> tuple[str, str]:
    """The commands for C and C++: the machine's own, or ziglang's if one of the two is missing."""
    c, cxx = _found("CC"), _found("CXX")
    if c and cxx:
        return c, cxx
    # Unless told otherwise, zig compiles for the very processor it runs on, and for the newest C library it knows.
    zig, target = f"{shlex.quote(sys.executable)} -m ziglang", f"-target {os.uname().machine}-linux-gnu.2.28"
    return f"{zig} cc {target}", f"{zig} c++ {target}"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    wanted: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    return wanted if _found("CC") and _found("CXX") else [*wanted, "ziglang"]


get_requires_for_build_editable = get_requires_for_build_wheel
