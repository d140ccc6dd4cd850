"""Each name of torch's ProcessGroup, on a group of ours. See table.py."""

import torch
import torch.distributed as dist

from .table import OPERATIONS, SECONDS, SETTINGS, Inherited, Refused, _new_group, answers, finished, gather_single, same

CPU = torch.device("cpu")


def _hooks(p, _):
    """Called before and after each operation, until they are taken out."""
    group, seen = _new_group(p), []
    group.register_pre_hook(1, lambda args: seen.append("before"))
    group.register_post_hook(2, lambda args: seen.append("after"))
    t = p.mine()
    dist.all_reduce(t, group=group)
    same(t, p.total)
    assert seen == ["before", "after"], seen
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    dist.all_reduce(t, group=group)
    assert len(seen) == 2
    dist.destroy_process_group(group)


def _split(p, group):
    """One group for each rank, then one for all, in reverse order."""
    alone = group.split_group([p.rank], SECONDS)
    assert (alone.rank(), alone.size(), alone.name()) == (0, 1, "custom")
    t = p.mine()
    finished(alone.allreduce(t))
    same(t, float(p.rank + 1))
    turned = group.split_group(list(range(p.size))[::-1], SECONDS)
    assert turned.rank() == p.size - 1 - p.rank
    finished(turned.allreduce(t))
    same(t, p.total)
    for made in (alone, turned):
        made.shutdown()


def _monitored_barrier(p, group):
    group.monitored_barrier(SECONDS)


def _get_backend(p, group):
    assert group._get_backend(CPU) is group._get_backend(CPU) and group._get_backend(CPU).name() == "custom"
    try:
        group._get_backend(torch.device("xpu"))
    except RuntimeError as error:
        assert "xpu" in str(error)
    else:
        raise AssertionError("a backend for xpu")


def _boxed(p, group):
    """To a script object and back: what graphs hold of a group."""
    assert dist.ProcessGroup.unbox(group.boxed()) is group


def _name(p, _):
    group = _new_group(p)
    group._set_group_name("another")
    group._set_group_desc("described")
    assert (group.group_name, group.group_desc) == ("another", "described")
    group.shutdown()


GROUP = {
    **OPERATIONS,
    **SETTINGS,
    **{name: gather_single(name) for name in ("gather_single", "gather_into_tensor")},
    "monitored_barrier": _monitored_barrier,
    "split_group": _split,
    "merge_remote_group": Refused(
        "does not support merge_remote_group", lambda p, g: g.merge_remote_group(g.get_group_store(), p.size, SECONDS)
    ),
    "_register_on_completion_hook": Refused(
        "does not support _register_on_completion_hook", lambda p, g: g._register_on_completion_hook(print)
    ),
    "_enable_collectives_timing": lambda p, g: g._enable_collectives_timing(),  # of GPUs: tests/cuda/test_asked_for.py
    "register_pre_hook": _hooks,
    "register_post_hook": _hooks,
    "unregister_pre_hook": _hooks,
    "unregister_post_hook": _hooks,
    "_device_types": answers("_device_types", lambda p: [CPU]),
    "_get_backend": _get_backend,
    "get_backend": _get_backend,
    "_has_hooks": answers("_has_hooks", lambda p: False),
    "get_group_store": lambda p, g: g.get_group_store().set(f"of rank {p.rank}", "1"),
    "_set_group_name": _name,
    "_set_group_desc": _name,
    "group_name": _name,
    "group_desc": _name,
    "boxed": _boxed,
    "unbox": _boxed,
    "_id": Inherited("the address of the object in C++"),
    "_backend_id": Inherited("the address of the backend in C++"),
    "_set_default_backend": Inherited("torch's own table of a group's backends"),
    "_register_backend": Inherited("torch's own table of a group's backends"),
    "bound_device_id": Inherited("a field that torch keeps; registration.py fills it in"),
    "use_pg_for_symm_mem_rendezvous": Inherited("a field that torch keeps, for its symmetric memory of CUDA tensors"),
    **{
        name: Inherited("a constant")
        for name in ("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL")
    },
}
# Names that no group of ours overrides and that end in torch's C++, which then refuses or asks the backend.
LEFT_TO_TORCH = {
    "rank",
    "size",
    "name",
    "boxed",
    "unbox",
    "_set_group_name",
    "_set_group_desc",
    "group_name",
    "group_desc",
    "unregister_pre_hook",
    "unregister_post_hook",
    "supports_reconfigure",
    "supports_abort_hooks",
    "supports_completion_hooks",
}
