"""The answers that a machine's GPU gave to the probes: kept in a file of the user's, for the groups made here later.

One file for each GPU and version of its driver, in the user's cache folder. It says how processes wait for each other,
so it counts only where nobody but this user can have written it, and where all of it is as `keep` writes it: anything
else is the same as no file, and so is what was answered under another kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import stat
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...config import cache_folder
from .decisions import QUESTIONS, Answers

_FORMAT = 1
_MOST = 1 << 16  # bytes
_LARGEST = 1e12
_VERSIONS = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")


def driver_version() -> str:
    """The version of the GPU's driver; "" where it cannot be known."""
    for path in _VERSIONS:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if found := re.search(r"\b\d+\.\d+(\.\d+)?\b", Path(path).read_text()):
                return found[0]
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        if not ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return f"cuda-{version.value}"
    return ""


def file_of(uuid: str, driver: str) -> Path | None:
    """Where the answers of this GPU under this driver lie; None where there is no such place."""
    folder = cache_folder()
    if folder is None or not uuid or not driver:
        return None
    return folder / re.sub(r"[^A-Za-z0-9.-]", "_", f"gpu-{uuid}-driver-{driver}.json")


def keep(answers: Answers, uuid: str, driver: str, device: str) -> Path:
    """Writes them; OSError where that cannot be."""
    path = file_of(uuid, driver)
    if path is None:
        raise FileNotFoundError("no home directory, or the GPU or its driver cannot be told from others")
    record = {
        "format": _FORMAT,
        "uuid": uuid,
        "driver": driver,
        "kernel": os.uname().release,
        "device": device,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "answers": dict(answers),
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(prefix=".part-", dir=path.parent)  # of mode 0600
    try:
        with os.fdopen(descriptor, "w") as f:
            json.dump(record, f, indent=1)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    return path


def kept(uuid: str, driver: str) -> dict[str, Any] | None:
    """What `keep` wrote, or None."""
    path = file_of(uuid, driver)
    try:
        record = json.loads(_own(path)) if path is not None else None
    except (OSError, ValueError, RecursionError):
        return None
    return record if _sound(record, uuid, driver) else None


def _own(path: Path) -> bytes:
    """The contents of a file that nobody but this user can have written; else OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as f:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        data = f.read(_MOST + 1)
    if len(data) > _MOST:
        raise OSError(f"{path} is too long")
    return data


def _sound(record: Any, uuid: str, driver: str) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("answers"), dict):
        return False
    here = {"format": _FORMAT, "uuid": uuid, "driver": driver, "kernel": os.uname().release}
    if any(record.get(name) != value for name, value in here.items()):
        return False
    if not all(isinstance(record.get(name), str) for name in ("device", "date")):
        return False
    return all(fits(key, answer) for key, answer in record["answers"].items())


def fits(key: str, answer: object) -> bool:
    """Whether the question is known, and the answer one that it can have."""
    if key not in QUESTIONS:
        return False
    if not QUESTIONS[key].unit:
        return isinstance(answer, bool)
    return isinstance(answer, int | float) and not isinstance(answer, bool) and 0 <= answer <= _LARGEST


def answers_of(uuid: str) -> dict[str, bool | float] | None:
    """Those of this GPU, as its driver is now; None if it was not asked."""
    record = kept(uuid, driver_version())
    return None if record is None else record["answers"]
