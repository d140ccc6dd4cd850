"""Makes the backend known to torch.distributed, and makes its groups when torch asks for them, whole or, by a device
string ("cuda:nccl,cpu:custom"), in part.

`register` costs next to nothing: torch before 2.14 has it called at `import torch`. What a group needs is imported when
one is made."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import NAME, Served, optional, replaced

if TYPE_CHECKING:
    from .issuing import NewGroup
    from .process_group import CustomProcessGroup


# The first torch in which a Backend made in Python serves some of a group's devices: for errors.
# torch_private.REGISTERED decides.
_FIRST_TO_MIX = "2.14"

_ready: CustomProcessGroup | None = None  # see ready_made


def register() -> None:
    """Registers "custom" with torch.distributed; again does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    with optional("groups for CUDA tensors where no device is named"):
        dist.Backend.backend_capability[NAME] = Served(_warn_of_torchcomms)  # type: ignore[assignment]


def _warn_of_torchcomms() -> None:
    """When a group names this backend. With that variable set, torch before 2.14 asks torchcomms for every group,
    whatever its backend, and torchcomms does not know ours."""
    if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") in ("", "0"):
        return
    import warnings

    from torch.distributed import distributed_c10d as c10d

    if getattr(c10d, "_TORCHCOMM_AVAILABLE", False) and not hasattr(c10d, "_torchcomms_handles_backend"):
        warnings.warn(
            f'init_process_group("{NAME}") will fail: TORCH_DISTRIBUTED_USE_TORCHCOMMS is set, and this '
            "torch then asks torchcomms for every group. Unset it, or use torch 2.14 or newer.",
            RuntimeWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def ready_made(group: CustomProcessGroup) -> Iterator[None]:
    """Inside, the next `create` takes this group, which has been made already."""
    global _ready
    _ready = group
    try:
        yield
    finally:
        _ready = None


def create(options: Any, backend_options: Any) -> Any:
    """Builds the group, or its part, for torch's _DistributedBackendOptions. Collective over the group's ranks;
    TransportError on all of them if any cannot take part. UsageError where torch would drop another backend.
    ``backend_options``: the caller's pg_options, any object; of ProcessGroupNCCL's, one is known here."""
    global _ready
    with _no_garbage_collected():
        from .process_group import build
        from .torch_private import spare_recorder

    spare_recorder(options)
    asked, strangers = _device_map(options), _of_strangers(options)
    others = {device: name for device, name in asked.items() if not _is_ours(name)}
    ours = {device: name for device, name in asked.items() if _is_ours(name)}  # none: all
    if others:
        if getattr(options, "enable_reconfigure", False):
            from ..errors import UsageError

            raise UsageError(f'enable_reconfigure: "{NAME}" does it for groups that are all its own, not for {asked}')
        return _for_some_devices(options, ours, others, strangers)
    if _ready is not None:
        group, _ready = _ready, None
        group.setGroupName(options.group_id)
    elif getattr(options, "enable_reconfigure", False):  # torch 2.15
        from .process_group import build_later

        group = build_later(_new_group(options, ours, strangers, backend_options))
    else:
        group = build(_new_group(options, ours, strangers, backend_options))
    plain = getattr(options, "process_group", None)
    if plain is not None and plain.bound_device_id is not None:
        group.bound_device_id = plain.bound_device_id
    return group


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """While modules are imported, which makes objects, and no garbage: with all of torch's objects to look through, the
    collector would take a fifth of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_ours(name: str) -> bool:
    return name == NAME or name in replaced


def _for_some_devices(options: Any, ours: dict[str, str], others: dict[str, str], strangers: bool) -> Any:
    """A Backend, that torch puts beside those of the other devices."""
    import torch
    from torch.distributed import Backend, ProcessGroup

    from ..errors import UsageError
    from .backend import build_backend
    from .torch_private import REGISTERED

    string = ",".join(f"{device}:{name}" for device, name in {**ours, **others}.items())
    if not REGISTERED:
        raise UsageError(
            f'backend "{string}": torch {torch.__version__} drops the other backend of a group as soon as one of '
            f'them is "{NAME}"; it takes torch {_FIRST_TO_MIX} or newer to have both. Write '
            f'init_process_group("{NAME}") for all devices, or make two groups: '
            f'init_process_group("{next(iter(others.values()))}") and new_group(backend="{NAME}").'
        )
    alike = [
        name
        for name in others.values()
        if Backend.backend_type_map.get(name) in (None, ProcessGroup.BackendType.CUSTOM)
    ]
    if alike and NAME in ours.values():  # under a replaced name, torch takes ours for that one's type
        raise UsageError(
            f'backend "{string}": of "{NAME}" and "{alike[0]}" torch keeps one in a group, because both are of the '
            f'type that it calls custom. Make two groups: init_process_group("{alike[0]}") and '
            f'new_group(backend="{NAME}"); or c10d_custom.replace("gloo"), and name gloo where "{NAME}" is named now.'
        )
    plain = options.process_group
    for device in ours:  # one serves all of ours; torch asks once for each
        if any(known.type == device for known in plain._device_types):
            return plain._get_backend(torch.device(device))
    return build_backend(_new_group(options, ours, strangers))


def _new_group(options: Any, ours: dict[str, str], strangers: bool, wanted: Any = None) -> NewGroup:
    from ..creation.bounded_store import whole
    from .issuing import NewGroup

    return NewGroup(
        whole(options.store),
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
        devices=list(ours) or None,
        strangers=strangers,
        first=getattr(wanted, "is_high_priority_stream", False) is True,
    )


def _of_strangers(options: Any) -> bool:
    """Whether the group joins processes that share no default group, as programs make one over a trainer and an
    inference engine: by _new_process_group_helper, with a store of their own and, as the default group is made, with no
    global ranks. Of a process that has no default group, torch's own description tells the two apart."""
    import torch.distributed as dist

    if list(options.global_ranks_in_group):
        return False
    if dist.group.WORLD is not None:
        return True
    from .torch_private import variables_of_maker

    with optional("groups over processes of several jobs, in one that has no default group"):
        return bool(variables_of_maker()["group_desc"] != "default_pg")
    return False


def _device_map(options: Any) -> dict[str, str]:
    """{type of device: name of backend} of the group that torch is making; {} where no device was named, or where that
    cannot be told and nothing speaks for a second backend. torch does not say it to the maker of a backend: the
    caller's variables do."""
    from ..errors import UsageError
    from .torch_private import variables_of_maker

    with optional("telling apart which devices of a group are for this backend"):
        given = variables_of_maker()
        named = ":" in str(given["backend"])
        return dict(given["backend_config"].get_device_backend_map()) if named else {}
    plain = getattr(options, "process_group", None)
    if plain is not None and (plain._device_types or plain.name() != NAME):
        raise UsageError(
            f'this torch does not let "{NAME}" be one backend of several in a group: write '
            f'init_process_group("{NAME}") for all devices, or make two groups'
        )
    return {}
