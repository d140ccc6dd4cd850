"""Events of the torch profiler, named as c10d's own backends name theirs ("custom:all_reduce")."""
import contextlib

import torch

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


def recorded(group, name, tensors):
    """A context that records one operation while a profiler runs; otherwise one that gives None."""
    if not torch.autograd._profiler_enabled():
        return _NO_RECORD
    return _Record(f"{group.getBackendName()}:{name}", tensors)
