"""What the failing or the end of a group may need, read while there is something to read it from.

Modules that only word errors, or tell what ranks do, are not loaded at a rank's start, which would take longer. Later
there may be no descriptor to read them with, or no file: the package was removed, or another has taken its place, or it
is out of reach (chroot). So the first group of a process reads them, some 20 us each; who imports one gets it from
memory."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import cache_from_source, find_spec, spec_from_file_location
from types import CodeType, ModuleType
from typing import Any

_PACKAGE = __package__.rpartition(".")[0]

# Every module that is imported inside a function which may run after a group was made and before a call of it has
# ended, and what those import in turn; tests/unit/test_read_ahead.py compares.
NAMES = (
    "transport.call_log",
    "transport.disagreement",
    "transport.failure",
    "transport.shm.error_text",
    "c10d.monitored_barrier",
    "c10d.ddp_buckets",
)

_read: dict[str, Any] = {}  # full name -> what gives its spec


class _InMemory(SourceFileLoader):
    """Of a file that has been read: its byte code or, where that is not there or older, its source."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self._status, self._files = super().path_stats(path), {}
        with contextlib.suppress(OSError):
            self._files[cache_from_source(path)] = code = super().get_data(cache_from_source(path))
            if code[4:8] == bytes(4) and code[8:12] == struct.pack("<I", int(self._status["mtime"]) & 0xFFFFFFFF):
                return
        self._files[path] = super().get_data(path)

    def path_stats(self, path: Any) -> Any:
        return self._status

    def get_data(self, path: Any) -> bytes:
        return self._files.get(path) or super().get_data(path)

    def spec(self) -> ModuleSpec | None:
        return spec_from_file_location(self.name, self.path, loader=self)


class _FromElsewhere:
    """A module in an archive, read by the archive's own loader."""

    def __init__(self, name: str) -> None:
        self._name, self._loader = name, find_spec(name).loader  # type: ignore[union-attr]
        self._code: CodeType = self._loader.get_code(name)  # type: ignore[union-attr]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def spec(self) -> ModuleSpec:
        return ModuleSpec(self._name, self, origin=self._code.co_filename)  # type: ignore[arg-type]


class _Finder:
    """Finds what has been read ahead; for sys.meta_path."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        found = _read.get(name)
        return found.spec() if found is not None else None


def read_ahead() -> None:
    """Reads the modules of NAMES that are not imported yet; called again, does nothing."""
    if _read:
        return
    package = sys.modules[_PACKAGE]
    loader, folder = package.__loader__, os.path.dirname(package.__file__ or "")
    found: dict[str, Any] = {}
    try:
        for name in NAMES:
            full = f"{_PACKAGE}.{name}"
            if full in sys.modules:
                continue
            if type(loader) is SourceFileLoader:
                found[full] = _InMemory(full, os.path.join(folder, *name.split(".")) + ".py")
            else:
                found[full] = _FromElsewhere(full)
    except (OSError, ImportError, AttributeError):  # they are found later, or not: transport's `plain_error`
        return
    if found and sys.meta_path is not None:
        _read.update(found)
        sys.meta_path.insert(0, _Finder)
