"""Events of the torch profiler, named as c10d's own backends name theirs ("custom:all_reduce")."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

import torch

from .names import NAME
from .optional import optional

_NO_RECORD = contextlib.nullcontext()


class _Record:
    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._handle = torch.autograd._record_function_with_args_enter(name, *tensors)
        self._open = True
        self._later = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._later:
            self.end()

    def goes_on(self) -> None:
        """The operation outlives the call that issues it: `end` comes later, from any thread."""
        self._later = True

    def end(self) -> None:
        if self._open:
            self._open = False
            with optional("recording operations for the profiler"):
                torch.autograd._record_function_with_args_exit(self._handle)


def _never() -> bool:
    return False


# Whether a profiler runs.
profiler_enabled = getattr(torch.autograd, "_profiler_enabled", _never)


def recorded(operation: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[_Record | None]:
    """A context that records one operation while a profiler runs; otherwise one that gives None."""
    if not profiler_enabled():
        return _NO_RECORD
    with optional("recording operations for the profiler"):
        return _Record(f"{NAME}:{operation}", tensors)
    return _NO_RECORD
