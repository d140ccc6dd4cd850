"""The group as torch's C++ sees it, where a torch (2.14 and newer) lets Python make a c10d Backend: raw operators
(`torch.ops.c10d`), hooks, and groups of which only some devices are ours. It forwards; what is done is in
operations.py.

Where the whole group is ours, most calls of `torch.distributed` do not come here: they find the methods of
process_group.CustomProcessGroup, where a call costs a fraction of the time. Two kinds of call go by torch's dispatcher
all the same, as calls of torch's own groups do, and so come to the Backend: calls that somebody watches (a dispatch
mode, a transform of functorch, a tracer, a profiler), and calls on tensors that are more than memory (native/direct.py
says which). A torch before 2.14 has no Backend for Python. There such a call is carried out on the plain tensors that
stand behind those it was given; where that would not be the same, it is refused, and the error says why."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..errors import AbortedError, UsageError
from ..native import direct
from ..threads import threading
from . import IMPLEMENTATION, NAME
from .issuing import NewGroup
from .meeting import meet
from .operations import Operations
from .torch_private import REGISTERED, TorchBackend, opaque_to_dynamo, profiler_enabled
from .work import DoneWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store

    from .issuing import Issuing


_UNANNOUNCED = "send", "recv", "recv_anysource", "monitored_barrier"  # no other rank waits for such a call's number
_FIRST_TO_SEE = "2.14"  # for errors; torch_private.REGISTERED decides

_function_modes = torch._C._len_torch_function_stack


class _Reached(threading.local):
    """Whether this thread's call has come out of the dispatcher, in the group's Backend, and the Works made there."""

    yes = False

    def __init__(self) -> None:
        self.works: list[Any] = []


reached = _Reached()


def below(group: Issuing) -> Operations:
    """The operations of a group, without its way through the dispatcher: with the same state."""
    operations = object.__new__(Operations)
    operations.__dict__ = group.__dict__
    return operations


class Dispatching(Operations):
    """What a whole group adds to its operations: the way through the dispatcher."""

    _registered = False  # whether torch's C++ knows the group's Backend
    # Calls under way through the dispatcher, and one more where all go there. While there are any, the group's methods
    # are torch's: torch's C++ would else come back to ours.
    _passing = 0
    _entering = threading.RLock()

    def _by_torch(self, *tensors: Any) -> bool:
        return profiler_enabled() or self._unlike_memory(*tensors)

    def _unlike_memory(self, *tensors: Any) -> bool:
        return bool(_function_modes()) or not direct.goes_direct(*tensors)

    def _dispatched(self, name: str, *arguments: Any) -> Any:
        """The operation of that name of torch's group. ``arguments``: as the method was given them."""
        if not self._registered:
            return self._unseen(name, arguments)
        if not profiler_enabled() and direct.goes_direct(*arguments):
            with direct.without_functions():
                return getattr(Operations, name)(below(self), *arguments)
        # torch's methods have one form without each.
        given = [_with_values(a) if isinstance(a, (list, tuple)) else a for a in arguments if a is not None]
        outer, reached.yes, reached.works = (reached.yes, reached.works), False, []
        try:
            with self._as_torch():
                result = vars(ProcessGroup)[name](self, *given)
            # What C++ has made of a Work of ours says neither whether it is over nor where a message came from.
            return reached.works[0] if len(reached.works) == 1 and isinstance(result, dist.Work) else result
        except Exception:
            # Under a mode nobody knows what becomes of the others' calls.
            if not reached.yes and name not in _UNANNOUNCED and direct.nobody_watches():
                self._tell_refused()
            raise
        finally:
            reached.yes, reached.works = outer

    @contextmanager
    def _as_torch(self) -> Iterator[None]:
        """Inside, the group's methods are torch's own, for other threads, too: their calls are carried out as well."""
        self._enter()
        try:
            yield
        finally:
            with self._entering:
                self._passing -= 1
                if not self._passing:
                    self.__class__ = self._ours

    def _enter(self) -> None:
        with self._entering:
            self._passing += 1
            self.__class__ = self._torchs

    def dispatch(self) -> None:
        """From now on, all calls of this group go through torch's dispatcher, where hooks are called before and after
        them, and which takes some 20 to 50 us longer."""
        self._enter()

    _ours: type[Any]
    _torchs: type[Any]

    def _unseen(self, name: str, arguments: Sequence[Any]) -> Any:
        if traced := _traced():
            raise UsageError(
                f"{name} inside {traced}: torch {torch.__version__} does not show it calls of this backend, and it "
                f"would be left out of what is recorded. It takes torch {_FIRST_TO_SEE} or newer."
            )
        with direct.without_functions():
            given = self._lowered(lambda: [_memory_of(name, a) for a in arguments])
            return getattr(Operations, name)(below(self), *given)


def _traced() -> str:
    """What makes a record of calls, or another thing than the call, in this thread; "" where nothing does."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    kinds = torch._C._TorchDispatchModeKey
    for kind in ("PROXY", "FAKE", "FUNCTIONAL"):
        mode = torch._C._get_dispatch_mode(getattr(kinds, kind))
        if mode is not None:
            return type(mode).__name__
    return ""


def _with_values(tensors: Any) -> Any:
    """A list as torch's dispatcher should get it: it looks for what stands for another tensor in lists, and not in
    lists of lists. There we do it, for what has its values in one other tensor."""
    return [[_behind(t) for t in part] if isinstance(part, (list, tuple)) else part for part in tensors]


def _behind(t: Any) -> Any:
    if type(t).__name__ == "AsyncCollectiveTensor":
        return t.trigger_wait()
    functorch = torch._C._functorch
    while isinstance(t, torch.Tensor) and functorch.is_gradtrackingtensor(t):
        t = functorch.get_unwrapped(t)
    return t


def _memory_of(name: str, argument: Any) -> Any:
    """The argument, or the plain tensor that it stands for. UsageError where there is none."""
    if isinstance(argument, (list, tuple)):
        return [_memory_of(name, a) for a in argument]
    if not isinstance(argument, torch.Tensor) or argument.is_meta or not direct.stands_for_another(argument):
        return argument
    if (behind := _behind(argument)) is not argument:
        return _memory_of(name, behind)
    raise UsageError(
        f"{name}: a {type(argument).__name__} with the keys {torch._C._dispatch_keys(argument)} is no memory that can "
        f"be communicated; with torch {_FIRST_TO_SEE} or newer it is up to its class"
    )


# What torch's C++ passes on to a Backend made in Python; of operations, gather_single alone is not among it (torch
# 2.15).
FORWARDED = (
    "broadcast",
    "allreduce",
    "allreduce_sparse",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
)


def _forwarded(name: str) -> Callable[..., Any]:
    method = getattr(Operations, name)

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        reached.yes = True
        with direct.without_functions():
            work = method(self._below(), *arguments, **options)
        if work is None:
            work = DoneWork(_tensors(arguments[0]) if arguments else [])
        reached.works.append(work)
        return work

    return forward


def _tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    # Else: options of a barrier.
    return [t for output in outputs for t in _tensors(output)] if isinstance(outputs, list) else []


# Backends that have not been shut down. Where C++ alone refers to one (under TORCH_DISTRIBUTED_DEBUG=DETAIL), it does
# not keep our half of it alive.
_in_use: set[CustomBackend] = set()


def build_backend(new: NewGroup) -> CustomBackend:
    """A CustomBackend for some devices of a group of torch's. Collective over the group's ranks, as `meet`."""
    operations = Operations()
    operations._set_up(*meet(new), new)
    backend = CustomBackend(operations, owner=True)
    _in_use.add(backend)
    return backend


class CustomBackend(TorchBackend):
    """What `ProcessGroup._get_backend` answers. Forwards to ``operations``, an Operations. ``owner``: whether that
    lives as long as this does. Otherwise it is the group, in which torch keeps this: a reference back would be a cycle
    through C++, which nothing collects. Of torch's C++ too where REGISTERED."""

    def __init__(self, operations: Issuing, owner: bool) -> None:
        if REGISTERED:
            TorchBackend.__init__(self, operations._group_rank, operations._group_size)
        self._own = operations if owner else None
        self._operations = weakref.ref(operations)

    @property
    def operations(self) -> Any:
        found = self._operations()
        if found is None:
            raise AbortedError("this backend's group has been destroyed")
        return found

    def _below(self) -> Operations:
        return self.operations if self._own is not None else below(self.operations)

    @property
    def options(self) -> Any:
        if not REGISTERED:
            return None
        options = TorchBackend.Options(NAME, timeout=self.operations.timeout)
        options.global_ranks_in_group = list(self.operations._transport.members)
        options.group_name = self.operations._name
        return options

    def rank(self) -> int:  # C++ keeps those of before a reconfigure
        return int(self.operations._group_rank)

    def size(self) -> int:
        return int(self.operations._group_size)

    # --- what torch asks a backend about itself

    supports_splitting = True
    supports_coalescing = False  # batches of messages are several Works, as gloo's
    supports_time_estimate = False
    _supports_time_estimate = False
    supports_shrinking = False

    @property
    def supports_window(self) -> bool:
        return bool(self.operations.supports_window)

    def new_window(self, tensor: torch.Tensor | None = None) -> Any:
        return self.operations.new_window(tensor)

    @property
    def supports_reconfigure(self) -> bool:
        return getattr(self.operations, "endpoint", None) is not None

    def supports_tensor_alloc(self, device: Any) -> bool:
        if isinstance(device, int):  # DDP's reducer: what it would then ask for, c10::TensorOptions, no Python can take
            return False
        return torch.device(device).type == "cpu" and bool(self.operations.cpu_transport.has_arena())

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if not self.supports_tensor_alloc(device):
            raise UsageError(f"allocate_tensor: group {self.operations._name} has no memory of its own for {device}")
        from .allocation import allocated  # when wanted: an import takes its time at a rank's start

        return allocated(self.operations, size, dtype)

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    def _get_backend_name(self) -> str:
        return IMPLEMENTATION

    def eager_connect_single_device(self, device: Any) -> None:
        """Of the default group: what its first collective there would do. Further groups take GPU memory when they are
        used; on CPUs, a group is connected when it is made."""
        if dist.group.WORLD is None:
            self.operations.connect(device)

    def perform_nocolor_split(self, device: object) -> None:
        """Ranks that are in none of the groups that a group is split into have nothing to do."""

    # --- settings

    def set_timeout(self, timeout: timedelta) -> None:
        self.operations.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_group_uid(self, uid: str) -> None:
        TorchBackend._set_group_uid(self, uid)  # type: ignore[attr-defined]
        if self._own is not None:
            self._own._name = self._own._transport.name = uid

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        self.operations._add_ephemeral_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return max(0, self.operations._get_sequence_number_for_group())

    def _set_sequence_number_for_group(self) -> None:
        """They begin at 0 on every rank."""

    def _wait_for_pending_works(self) -> None:
        self.operations._wait_for_pending_works()

    # --- operations with arguments of their own

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        given = getattr(opts, "timeout", opts)
        given = given if isinstance(given, timedelta) and given > timedelta(0) else None
        reached.yes = True
        with direct.without_functions():
            self._below().monitored_barrier(given, wait_all_ranks)

    def start_coalescing(self) -> None:
        self.operations._start_coalescing()

    def end_coalescing(self) -> Any:
        return self.operations._end_coalescing()

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # --- life

    def split(self, store: Store, ranks: list[int], opts: Any = None) -> CustomBackend:
        """The backend of a new group of ``ranks``, as `Issuing._split`."""
        operations, timeout = self.operations, getattr(opts, "_timeout", None)
        name, devices = getattr(opts, "group_name", ""), operations._transport.device_types
        if (new := operations._split(ranks, store, timeout, name, devices)) is None:
            # torch 2.15 crashes on None from a Backend made in Python.
            raise UsageError(
                f"split_group of group {operations._name}: rank {operations._group_rank} is in none of the new "
                f"groups ({list(ranks)} is the first). Give it one, a group of its own if need be, or use "
                "new_group."
            )
        return build_backend(new)

    def get_reconfigure_handle(self) -> str:
        if self._own is not None:  # of a group of which other devices are another's
            return super().get_reconfigure_handle()
        return str(self.operations.get_reconfigure_handle())

    def reconfigure(self, opts: Any) -> Any:
        if self._own is not None:
            return super().reconfigure(opts)
        return self.operations.reconfigure(opts)

    def abort(self) -> None:
        self.operations.abort()

    def shutdown(self) -> None:
        if (operations := self._operations()) is not None:
            operations.shutdown()
        _in_use.discard(self)


for _name in FORWARDED:
    _method = _forwarded(_name)
    _method.__name__ = _name
    setattr(CustomBackend, _name, _method)
opaque_to_dynamo(CustomBackend)
