"""Groups of another backend under gloo's name, in this process: torch's suite asks by name what a backend can do."""

import functools

from torch.distributed import distributed_c10d as c10d

from c10d_custom.c10d import torch_private


def as_gloo(backend):
    """From now on every group made as "gloo" is `backend`'s, and says "gloo" to Python callers and to profilers.

    The group itself keeps its name: DDP's C++ logger wants one that calls itself gloo to be gloo.
    """
    _build(backend)
    if backend == "custom":
        _profile(backend)


def _build(backend):
    helper, config = c10d._new_process_group_helper, c10d.BackendConfig

    @functools.wraps(helper)
    def new_process_group(*args, **options):
        # The kind of group comes from the configuration, the name that it is registered with does not.
        c10d.BackendConfig = lambda name: config(backend if name == "gloo" else name)
        try:
            return helper(*args, **options)
        finally:
            c10d.BackendConfig = config

    c10d._new_process_group_helper = new_process_group


def _profile(backend):
    record = torch_private._Record
    torch_private._Record = lambda name, tensors: record(name.replace(f"{backend}:", "gloo:", 1), tensors)
