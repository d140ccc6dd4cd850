"""Events of the torch profiler, named as c10d's own backends name theirs ("custom:all_reduce")."""

import contextlib

import torch

from .names import NAME
from .optional import optional

_NO_RECORD = contextlib.nullcontext()


class _Record:
    def __init__(self, name, tensors):
        self._handle = torch.autograd._record_function_with_args_enter(name, *tensors)
        self._open = True
        self._later = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self._later:
            self.end()

    def goes_on(self):
        """The operation outlives the call that issues it: `end` comes later, from any thread."""
        self._later = True

    def end(self):
        if self._open:
            self._open = False
            torch.autograd._record_function_with_args_exit(self._handle)


def _never():
    return False


# Whether a profiler runs.
profiler_enabled = getattr(torch.autograd, "_profiler_enabled", _never)


def recorded(operation, tensors):
    """A context that records one operation while a profiler runs; otherwise one that gives None."""
    if not profiler_enabled():
        return _NO_RECORD
    with optional("recording operations for the profiler"):
        return _Record(f"{NAME}:{operation}", tensors)
    return _NO_RECORD
