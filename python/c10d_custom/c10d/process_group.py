"""The group as Python sees it: what `torch.distributed`, DDP, FSDP and DTensor call."""

import atexit
import os
import signal
import threading

import torch
from torch.distributed import PrefixStore, ProcessGroup

from ..errors import UsageError
from .backend import FORWARDED, REGISTERED, DescribedBackend
from .dynamo import opaque_to_dynamo
from .issuing import live
from .meeting import meet
from .names import IMPLEMENTATION, NAME
from .operations import Operations
from .optional import optional
from .served import served_devices


def build(store, rank, size, timeout, name, members=None, processes=None, devices=None):
    """A group for tensors of ``devices`` (their types; None: all that this backend serves). The rest: see
    creation.meet."""
    transport, store = meet(store, rank, size, timeout, name, members, processes, devices)
    group = CustomProcessGroup(transport, store, rank, size, timeout, name)
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        group.dispatch()
    return group


@opaque_to_dynamo
class CustomProcessGroup(Operations, ProcessGroup):
    _registers_works = True

    def __init__(self, transport, store, rank, size, timeout, name):
        ProcessGroup.__init__(self, rank, size)
        self._set_up(transport, store, rank, size, timeout, name)
        self._backend = DescribedBackend(self)
        self._registered = False
        if REGISTERED:
            with optional("what torch's C++ calls by itself (torch.ops.c10d, the Flight Recorder, other hooks)"):
                self._register()

    def _register(self):
        """Makes this group's backend known to torch's C++."""
        from .backend import CustomBackend  # where there is one

        kind, backend = ProcessGroup.BackendType.CUSTOM, CustomBackend(self, owner=False)
        ProcessGroup._set_default_backend(self, kind)
        for device in self._devices():
            ProcessGroup._register_backend(self, device, kind, backend)
        backend._set_group_uid(self._name)
        self._backend, self._registered = backend, True

    # --- identity and settings

    def getBackendName(self):
        return NAME

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = self._transport.name = name
        if self._registered:
            self._backend._set_group_uid(name)

    def getGroupDesc(self):
        return self._desc

    def setGroupDesc(self, desc):
        self._desc = desc

    def getRank(self):
        return self._group_rank

    def getSize(self):
        return self._group_size

    def get_group_store(self):
        return self._store

    def _devices(self):
        return [torch.device(kind) for kind in self._transport.device_types or served_devices()]

    @property
    def _device_types(self):
        # A recorder that torch is about to attach would look for a backend in C++, and stop the group.
        if REGISTERED and not self._registered and _is_being_made(self):
            return []
        return self._devices()

    def _get_backend(self, device):
        if torch.device(device).type not in {d.type for d in self._devices()}:
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}: group {self._name} was "
                f"made for {', '.join(d.type for d in self._devices())}"
            )
        return self._backend

    get_backend = _get_backend

    def _get_backend_name(self):
        return IMPLEMENTATION

    def _has_hooks(self):
        return False

    def _set_sequence_number_for_group(self):
        """They begin at 0 on every rank."""

    # --- hooks

    def dispatch(self):
        """From now on, calls of this group go through torch's dispatcher, where hooks are called before and after them,
        and which takes some 20 to 50 us longer."""
        self.__class__ = DispatchedProcessGroup

    def register_pre_hook(self, hook_id, hook):
        ProcessGroup.register_pre_hook(self, hook_id, hook)
        self.dispatch()

    def register_post_hook(self, hook_id, hook):
        ProcessGroup.register_post_hook(self, hook_id, hook)
        self.dispatch()

    # --- life

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        """A group of ``ranks`` (of this group, in that order); None on the other ranks. Every rank of
        this group calls it, with disjoint lists. ``device_types``: those of its devices that the new group is for."""
        self._splits += 1
        if self._group_rank not in ranks:
            return None
        name = group_name or f"{self._name}:split:{self._splits}:{'_'.join(map(str, ranks))}"
        store = PrefixStore(f"split/{self._splits}/{'_'.join(map(str, ranks))}", self._store)
        members = [self._transport.members[r] for r in ranks]
        devices = self._transport.device_types if device_types is None else [torch.device(d).type for d in device_types]
        group = build(
            store, ranks.index(self._group_rank), len(ranks), timeout or self._timeout, name, members, devices=devices
        )
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        return group

    splitGroup = split_group


def _refusal(name):
    def refuse(self, *_arguments, **_options):
        raise UsageError(f"backend {NAME} does not support {name}")

    return refuse


# torch's own answers before 2.14: a group without a backend, or nothing at all.
for _name in ("merge_remote_group", "_enable_collectives_timing", "_register_on_completion_hook"):
    setattr(CustomProcessGroup, _name, _refusal(_name))
CustomProcessGroup.mergeRemoteGroup = CustomProcessGroup.merge_remote_group


class DispatchedProcessGroup(CustomProcessGroup):
    """A group whose operations are torch's own methods, which find their way to the backend registered in it."""

    _registers_works = False


for _name in (*FORWARDED, "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"):
    if _name in vars(ProcessGroup):
        setattr(DispatchedProcessGroup, _name, vars(ProcessGroup)[_name])


def _is_being_made(group):
    """Whether torch has not entered ``group`` among its groups yet."""
    from torch.distributed import distributed_c10d

    return group not in getattr(getattr(distributed_c10d, "_world", None), "pg_map", ())


@atexit.register
def _close_all():
    impatient = False
    try:
        if threading.current_thread() is threading.main_thread():
            impatient = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            # Another Ctrl-C ends the process here: raised in an exit handler, it would leave groups unclosed
            # and print a traceback of ours.
            if impatient:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    # A thread inside native code while the interpreter goes away would take the process with it.
    for group in live():
        group.shutdown()
    if impatient:
        signal.signal(signal.SIGINT, signal.default_int_handler)
