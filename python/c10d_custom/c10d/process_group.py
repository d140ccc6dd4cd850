"""The group as Python sees it: what `torch.distributed`, DDP, FSDP and DTensor call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import HashStore, ProcessGroup

from ..call import seconds_of
from ..errors import UsageError
from . import IMPLEMENTATION, NAME, optional, served_devices
from .backend import FORWARDED, CustomBackend, Dispatching
from .issuing import NewGroup, close_groups_first, live
from .meeting import meet
from .torch_private import REGISTERED, group_of_name, is_being_made, opaque_to_dynamo

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

    from ..recovery.handle import Endpoint
    from ..transport.by_device import ByDevice


def group_named(name: str) -> Any:
    """The process group of that name in this process. UsageError if there is none."""
    if (known := group_of_name(name)) is not None:
        return known
    # Made without torch, as by split_group or torchft.
    for group in live():
        if group._name == name and not group._closed:
            return group
    raise UsageError(
        f'a pickled process group named "{name}" cannot be loaded: this process has no group of that name. A group is '
        "pickled as its name alone: make the same groups, in the same order, before what holds them is loaded"
    )


def build(new: NewGroup) -> CustomProcessGroup:
    """The group that ``new`` says. Collective over its ranks, as `meet`."""
    group = CustomProcessGroup(*meet(new), new)
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        group.dispatch()
    return group


def build_later(new: NewGroup) -> CustomProcessGroup:
    """A group that has no ranks until `reconfigure` is called."""
    from ..recovery.handle import Endpoint
    from .reconfigure import not_yet

    group = CustomProcessGroup(not_yet(new), new.store, new)
    group.endpoint = Endpoint(seconds_of(new.timeout))
    return group


def build_and_meet(new: NewGroup) -> CustomProcessGroup:
    """A group as `build` makes it, once every rank has it; where one has not, an error, and nothing of it is left."""
    group = build(new)
    try:
        cast("Any", group.barrier()).wait()
    except BaseException:
        group.shutdown()
        raise
    return group


@opaque_to_dynamo
class CustomProcessGroup(Dispatching, ProcessGroup):  # type: ignore[misc]  # torch's have other arguments
    _registers_works = True
    _kinds: list[torch.device] | None = None
    endpoint: Endpoint | None = None  # of a group made with enable_reconfigure

    def __init__(self, transport: ByDevice, store: Store, new: NewGroup) -> None:
        ProcessGroup.__init__(self, new.rank, new.size)
        self._set_up(transport, store, new)
        self._backend = CustomBackend(self, owner=False)
        if REGISTERED:
            with optional("what torch's C++ calls by itself (torch.ops.c10d, the Flight Recorder, other hooks)"):
                self._register()

    def _register(self) -> None:
        """Makes this group's backend known to torch's C++."""
        kind = ProcessGroup.BackendType.CUSTOM
        ProcessGroup._set_default_backend(self, kind)
        for device in self._devices():
            ProcessGroup._register_backend(self, device, kind, self._backend)
        self._backend._set_group_uid(self._name)
        self._registered = True

    # --- identity and settings

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = self._transport.name = name
        if self._registered:
            self._backend._set_group_uid(name)

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getRank(self) -> int:
        return self._group_rank

    def getSize(self) -> int:
        return self._group_size

    rank, size = getRank, getSize  # torch's own would call these, by way of C++

    def get_group_store(self) -> Store:
        return self._store

    def _devices(self) -> list[torch.device]:
        if self._kinds is None:  # once: to ask for a GPU takes its time
            self._kinds = [torch.device(kind) for kind in self._transport.device_types or served_devices()]
        return list(self._kinds)

    @property
    def _device_types(self) -> list[torch.device]:
        # A recorder that torch is about to attach would look for a backend in C++, and stop the group.
        if REGISTERED and not self._registered and is_being_made(self):
            return []
        return self._devices()

    def _get_backend(self, device: Any) -> Any:
        # A mode of torch's functions sees devices being made.
        kind = device.type if isinstance(device, torch.device) else torch.device(device).type
        if kind not in {d.type for d in self._devices()}:
            raise RuntimeError(
                f"No backend type associated with device type {kind}: group {self._name} was made for "
                f"{', '.join(d.type for d in self._devices())}"
            )
        return self._backend

    get_backend = _get_backend

    def _get_backend_name(self) -> str:
        return IMPLEMENTATION

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """They begin at 0 on every rank."""

    # --- copies: of what holds a group, which go on with the same one

    def __copy__(self) -> CustomProcessGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomProcessGroup:
        return self

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return group_named, (self._name,)

    def _enable_collectives_timing(self) -> None:
        self._transport.time_calls()

    # --- hooks

    def register_pre_hook(self, hook_id: int, hook: Callable[..., Any]) -> None:
        ProcessGroup.register_pre_hook(self, hook_id, hook)
        self.dispatch()

    def register_post_hook(self, hook_id: int, hook: Callable[..., Any]) -> None:
        ProcessGroup.register_post_hook(self, hook_id, hook)
        self.dispatch()

    # --- life

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[Any] | None = None,
    ) -> CustomProcessGroup | None:
        """A group of ``ranks``, as `_split`. ``device_types``: those of this group's devices that it is for."""
        devices = self._transport.device_types if device_types is None else [torch.device(d).type for d in device_types]
        new = self._split(ranks, self._store, timeout, group_name, devices)
        if new is None:
            return None
        new.first = getattr(opts, "is_high_priority_stream", False) is True
        group = build(new)
        group._given_store = self._given_store  # its own is over that
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        return group

    splitGroup = split_group

    @property
    def supports_reconfigure(self) -> bool:
        return self.endpoint is not None

    def _require_endpoint(self, name: str) -> Endpoint:
        if self.endpoint is None:
            raise UsageError(
                f"backend {NAME} does not support {name} of group {self._name}, which was made without "
                "enable_reconfigure=True (init_process_group)"
            )
        return self.endpoint

    def get_reconfigure_handle(self) -> str:
        """By which this process is named in `reconfigure`: always the same."""
        return self._require_endpoint("get_reconfigure_handle").handle.text

    def reconfigure(self, opts: Any) -> Any:
        """Makes this group one of the processes with the handles in ``opts``, a ReconfigureOptions. Collective over
        them; what is under way on the group fails."""
        from .reconfigure import reconfigure

        self._require_endpoint("reconfigure")
        return reconfigure(self, opts)

    def shutdown(self, why: str = "") -> None:
        before = self._closed
        super().shutdown(why)
        if self.endpoint is not None and self._closed > before:
            for group in live():
                if group._closed:
                    # The endpoint's store ends, though the program may keep such a group.
                    group._store = group._given_store = HashStore()
            self.endpoint.close()


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *_arguments: Any, **_options: Any) -> None:
        raise UsageError(f"backend {NAME} does not support {name}")

    return refuse


# torch's own answers before 2.14: a group without a backend, or nothing at all.
for _name in ("merge_remote_group", "mergeRemoteGroup", "_register_on_completion_hook"):
    setattr(CustomProcessGroup, _name, _refusal(_name))


class DispatchedProcessGroup(CustomProcessGroup):
    """A group whose operations are torch's own methods, which find their way to the backend registered in it. What a
    group is while calls of it go that way: backend.py."""

    _registers_works = False


for _name in (*FORWARDED, "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"):
    if _name in vars(ProcessGroup):
        setattr(DispatchedProcessGroup, _name, vars(ProcessGroup)[_name])


CustomProcessGroup._ours, CustomProcessGroup._torchs = CustomProcessGroup, DispatchedProcessGroup


close_groups_first()
