"""Each name of torch's Backend, on ours (torch 2.14 and newer). See table.py."""

import torch

from .table import OPERATIONS, SECONDS, SETTINGS, Inherited, Refused, _allreduce_sparse, _coalescing, answers

_gone = ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")  # not a Backend's, in Python


def _split(p, backend):
    if p.rank == 0:
        alone = backend.split(p.group.get_group_store(), [0], backend.options)
        assert (alone.rank(), alone.size()) == (0, 1)
        alone.shutdown()
    else:
        try:
            backend.split(p.group.get_group_store(), [0], backend.options)
        except RuntimeError as error:
            assert "is in none of the new groups" in str(error)
        else:
            raise AssertionError("a part of a group for a rank that is in none")


def _options(p, backend):
    made = backend.options
    assert made._timeout == p.group.timeout and list(made.global_ranks_in_group) == list(range(p.size))


def _allocate(p, backend):
    """As fully_shard does; over hosts, and for GPUs, there is nothing to allocate."""
    for device, supported in ((torch.device("cpu"), p.group.cpu_transport.has_arena()), ("cuda:0", False)):
        assert backend.supports_tensor_alloc(device) is supported
        try:
            made = backend.allocate_tensor(2 << 20, dtype=torch.bfloat16, device=device)
            assert supported and (made.shape, made.dtype, made.device.type) == ((2 << 20,), torch.bfloat16, "cpu")
        except ValueError as error:
            assert not supported and "has no memory of its own" in str(error)


BACKEND = {
    **{name: trial for name, trial in {**OPERATIONS, **SETTINGS}.items() if name not in _gone},
    "allreduce_sparse": _allreduce_sparse,
    # torch 2.15 passes these on to no Backend made in Python.
    "gather_single": Refused("does not support gather_single", lambda p, b: b.gather_single(p.mine(), p.mine())),
    "gather_into_tensor": Refused("does not support gather_", lambda p, b: b.gather_into_tensor(p.mine(), p.mine())),
    "monitored_barrier": lambda p, b: b.monitored_barrier(SECONDS, True),
    "start_coalescing": lambda p, b: _coalescing(p, b, "start_coalescing", "end_coalescing"),
    "split": _split,
    "options": _options,
    "_set_group_uid": lambda p, b: b._set_group_uid(p.group.group_name),
    "_set_default_timeout": lambda p, b: b._set_default_timeout(p.group.timeout),
    "eager_connect_single_device": lambda p, b: b.eager_connect_single_device(torch.device("cpu", 0)),
    "get_error": lambda p, b: b.get_error().name == "SUCCESS" or None,
    "supports_splitting": answers("supports_splitting", lambda p: True),
    "supports_coalescing": answers("supports_coalescing", lambda p: False),
    "supports_shrinking": answers("supports_shrinking", lambda p: False),
    "supports_time_estimate": answers("supports_time_estimate", lambda p: False),
    "_supports_time_estimate": answers("_supports_time_estimate", lambda p: False),
    "supports_tensor_alloc": _allocate,
    "allocate_tensor": _allocate,
    "mem_allocator": Refused("does not support getMemAllocator", lambda p, b: b.mem_allocator),
    "memory_stats": Refused("does not support getMemoryStats", lambda p, b: b.memory_stats()),
    "suspend": Refused("does not support suspend", lambda p, b: b.suspend()),
    "resume": Refused("does not support resume", lambda p, b: b.resume()),
    "shrink": Refused("does not support shrink", lambda p, b: b.shrink([1])),
    "merge": Refused("merge", lambda p, b: b.merge(p.group.get_group_store(), b.options, p.rank, p.size)),
    "_start_time_estimate": Refused("does not support time estimation", lambda p, b: b._start_time_estimate()),
    "_end_time_estimate": Refused("does not support time estimation", lambda p, b: b._end_time_estimate()),
    "Options": Inherited("a class of torch's"),
    "bound_device_id": Inherited("a field that torch keeps"),
    "setUsePgForSymmMemRendezvous": Inherited("a field that torch keeps, for its symmetric memory of CUDA tensors"),
}
