"""What pip builds the package with (PEP 517): setuptools, and the compilers that setup.py takes. Where this machine has
none, the build asks for one from the package index: ziglang, which compiles C and C++ without anything of the system's.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
import tomllib
from pathlib import Path
from shutil import which
from typing import Any


def _setuptools() -> Any:
    """setuptools' builder. Ends the build where it is older than pyproject.toml asks for, or missing: what a build
    without isolation finds is not what pip would have installed."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    (wanted,) = tomllib.loads(project.read_text())["build-system"]["requires"]
    try:
        import setuptools
    except ModuleNotFoundError:
        found = "none"
    else:
        found = setuptools.__version__
        if int(found.partition(".")[0]) >= int(wanted.partition(">=")[2]):
            from setuptools import build_meta

            return build_meta
    raise SystemExit(
        f"c10d-custom is built with {wanted}, and {sys.executable} has {found}: pip install '{wanted}', or build "
        "without --no-build-isolation, and pip fetches it for the build alone"
    )


build_meta = _setuptools()
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
