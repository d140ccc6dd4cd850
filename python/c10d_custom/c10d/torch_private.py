"""Private names of torch on which groups rest: such names move. They are used here, or in the files that the table
names. Most uses are `optional` (c10d), or have a way around them, so that a torch without the name loses one feature,
with a warning, and nothing else; the last column says where it is more. tests/torch_api/test_names_that_moved.py holds
the table complete, and takes some of them away.

name in torch | used in | since torch | lost where it is not there
torch.distributed.isend, irecv, send, recv: their code | here | all | a signal handler may leave a message under way
torch.autograd.graph._engine_run_backward | here | all | DDP's buckets stay where they are: ddp_buckets.py
torch._C._dynamo.eval_frame.set_code_exec_strategy | here | all | torch.compile looks into the group's methods
torch._C._dynamo.eval_frame._FrameAction, _FrameExecStrategy | here | all | the same
torch.autograd._profiler_enabled | here | all | operations in a profile
torch.autograd._record_function_with_args_enter, _record_function_with_args_exit | here | all | the same
torch._C._distributed_c10d._register_work | here | all | collectives under way as inputs of compiled graphs
torch._C._distributed_c10d._allow_inflight_collective_as_graph_input | here | all | the same
torch.ops._c10d_functional.wait_tensor | work.py | all | the same
torch._C._distributed_c10d.Backend, made in Python | here | 2.14 | device strings of several backends, torch.ops.c10d
torch._C._distributed_c10d._resolve_process_group | here | all | groups that torch has made, in a pickle
torch.distributed.distributed_c10d._world | here, replacing.py | all | the Flight Recorder of a group amid its making
torch.distributed.distributed_c10d._new_process_group_helper | here, replacing.py | all | whose devices are whose
torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS | here | 2.15 | a warning of the Flight Recorder comes
torch.distributed.distributed_c10d._maybe_attach_flight_recorder | here | 2.15 | the same
torch.distributed.distributed_c10d._TORCHCOMM_AVAILABLE | registration.py | before 2.14 | a warning about torchcomms
torch.distributed.distributed_c10d._torchcomms_handles_backend | registration.py | 2.14 | a warning comes in vain
torch.distributed.Backend._plugins | registration.py, replacing.py | all | groups at all
torch.distributed.Backend._BackendPlugin | replacing.py | all | groups by gloo's name
torch.distributed.Backend._ensure_backend_registered | __init__.py, replacing.py | 2.14 | the same; a slower import
torch._C._distributed_c10d.Backend._set_group_uid | backend.py | 2.14 | torch.ops.c10d
torch.distributed.ProcessGroup._register_backend, _set_default_backend | process_group.py | all | torch.ops.c10d
torch.distributed.ProcessGroup._device_types, _get_backend | registration.py | all | device strings of several backends
torch.distributed.rendezvous._rendezvous_handlers | __init__.py | all | ranks that an MPI launcher has started
torch._C._dispatch_keys, DispatchKey, DispatchKeySet | native/direct.py | all | collectives at all: what a tensor is
torch._C._dispatch_keys | lowering/__init__.py, backend.py | all | collectives at all: what a tensor is
torch._C.DisableTorchFunction | native/direct.py | all | collectives at all: the memory of a subclass
torch._C._increment_version | native/direct.py | all | collectives at all: autograd is told that a tensor has changed
torch._C._get_tracing_state | native/direct.py, backend.py | all | collectives at all: whether calls are recorded
torch._C._len_torch_dispatch_stack | native/direct.py | all | collectives at all: whether modes are active
torch._C._functorch.peek_interpreter_stack | native/direct.py | all | collectives at all: whether vmap or grad is
torch._C._functorch.is_gradtrackingtensor, get_unwrapped | backend.py | all | calls by C++ on what grad has wrapped
torch._C._len_torch_function_stack | backend.py | all | collectives at all: whether modes are active
torch._C._get_dispatch_mode, _TorchDispatchModeKey | backend.py | all | collectives called by C++: which mode records
libc10's thread-local word of dispatch keys | native/direct.py | all | the fast way in C; found by trying
torch.Tensor._cdata | native/direct.py | all | the fast way in C
torch._neg_view, _efficientzerotensor | native/direct.py | all | the fast way in C
torch.utils._python_dispatch._disable_current_modes | native/direct.py | all | collectives at all
torch._C._distributed_c10d.WindowAccessType | here | 2.15 | a window's get_attr answers with an enum of ours
torch.UntypedStorage._swap_data_ptr_ | ddp_buckets.py, window.py | 2.12 | buckets and windows' tensors are not moved
torch.Tensor._nnz | lowering/sparse.py | all | all_reduce of sparse tensors
torch._C._storage_Use_Count | transport/cuda/in_place.py | all | of many tensors in place, some are mapped anew
torch.UntypedStorage._cdata | transport/cuda/in_place.py | all | all_reduce of CUDA tensors in place
torch.Tensor.__dlpack_c_exchange_api__ | native/direct.py | all | the fast way in C
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import graph

from . import NAME, optional

_ISEND, _IRECV, _SEND, _RECV = (inspect.unwrap(f).__code__ for f in (dist.isend, dist.irecv, dist.send, dist.recv))
_BACKWARD = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)


def posted_to_be_awaited() -> bool:
    """Whether a message is posted by dist.send or dist.recv, which wait for it right afterwards. To be asked one call
    below a group's ``send``, ``recv`` or ``recv_anysource``.

    A signal handler that raises between their two steps, after the message was posted and before its Work is waited
    for, would leave it under way with nobody to withdraw it. So for these the group waits before it returns the Work.
    """
    frame: Any = sys._getframe(3)
    if frame.f_code is _ISEND or frame.f_code is _IRECV:  # which they call
        frame = frame.f_back
    return frame.f_code is _SEND or frame.f_code is _RECV


def amid_backward_pass() -> bool:
    """Whether a collective is begun by C++ amid a backward pass, as DDP's Reducer does it. To be asked two calls below
    a group's method."""
    caller = sys._getframe(3).f_back
    return caller is not None and caller.f_code is _BACKWARD


_T = TypeVar("_T")


def opaque_to_dynamo(cls: type[_T]) -> type[_T]:
    """Keeps Dynamo out of a class's methods: when it traces a caller (the attribute is what
    torch.compiler.disable sets; importing that costs a second) and when C++, DDP's reducer say, calls
    one while compiled code runs."""
    with optional("torch.compile around calls of this backend"):
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for member in vars(cls).values():
            if callable(member) and hasattr(member, "__code__"):
                member._torchdynamo_disable = True
                set_code_exec_strategy(member.__code__, skip)
    return cls


def _never() -> bool:
    return False


# Whether we are in torch's allow_inflight_collective_as_graph_input_ctx.
works_are_graph_inputs: Callable[[], bool] = _never
register_work: Callable[[torch.Tensor, dist.Work], object] | None = None
with optional("collectives under way as inputs of compiled graphs"):
    from torch._C import _distributed_c10d

    works_are_graph_inputs = _distributed_c10d._allow_inflight_collective_as_graph_input
    register_work = _distributed_c10d._register_work

# Whether torch takes a Backend made in Python.
REGISTERED = False
try:
    from torch._C._distributed_c10d import Backend as TorchBackend

    class _Probe(TorchBackend):
        pass

    REGISTERED = _Probe(0, 1) is not None
except (ImportError, TypeError):  # "No constructor defined": before torch 2.14
    TorchBackend = object  # type: ignore[misc, assignment]


def is_being_made(group: Any) -> bool:
    """Whether torch has not entered ``group`` among its groups yet."""
    return group not in getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ())


def group_count() -> int:
    """The number by which torch names the next group of this process."""
    return int(getattr(getattr(dist.distributed_c10d, "_world", None), "group_count", 0))


def regrouped(group: Any, store: Any, count: int) -> None:
    """Has torch make further groups of the default group's new ranks: by their ``store``, named from ``count`` on."""
    with optional("further groups after a reconfigure"):
        world = dist.distributed_c10d._world
        world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
        world.pg_map[group] = (world.pg_map[group][0], store)
        world.group_count = count


def group_of_name(name: str) -> Any:
    """The group of that name which torch has made in this process; None where it has made none."""
    with contextlib.suppress(ImportError, RuntimeError):
        from torch._C._distributed_c10d import _resolve_process_group

        return _resolve_process_group(name)  # type: ignore[arg-type]  # torch's own type is a str
    return None


def variables_of_maker() -> dict[str, Any]:
    """The variables of torch's _new_process_group_helper, which is making a group now."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name != "_new_process_group_helper" or "backend_config" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals


_recorded_rank: int | None = None  # see spare_recorder


def spare_recorder(options: Any) -> None:
    """torch hooks its Flight Recorder to this group, but where that would warn: the recorder's files bear the rank that
    this process had when it first recorded, and warn of a group in which it has another (after a re-init, or in a group
    over two jobs)."""
    global _recorded_rank
    rank = options.group_rank
    if options.global_ranks_in_group:
        rank = options.global_ranks_in_group[rank]
    with optional("torch's Flight Recorder without a warning where a rank has changed"):
        if hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"):  # torch 2.15
            themselves = dist.distributed_c10d._FR_SELF_RECORDING_BACKENDS
            _recorded_rank = rank if _recorded_rank is None else _recorded_rank
            (themselves.discard if rank == _recorded_rank else themselves.add)(NAME)


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


class _AccessType(Enum):
    UNIFIED = 0
    SEPARATE = 1


class WindowAttr:
    """As torch 2.15's, which Python cannot fill in."""

    def __init__(self, unified: bool) -> None:
        types: Any = getattr(torch._C._distributed_c10d, "WindowAccessType", _AccessType)
        self.access_type = types.UNIFIED if unified else types.SEPARATE


# Whether a profiler runs.
profiler_enabled = getattr(torch.autograd, "_profiler_enabled", _never)


def recorded(operation: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[_Record | None]:
    """A context that records one operation while a profiler runs; otherwise one that gives None."""
    if not profiler_enabled():
        return _NO_RECORD
    with optional("recording operations for the profiler"):
        return _Record(f"{NAME}:{operation}", tensors)
    return _NO_RECORD
