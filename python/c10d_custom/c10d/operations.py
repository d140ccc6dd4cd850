"""c10d's operations on one group: unpacks c10d's arguments, asks `Lowering` for a Call, issues it, and returns a Work.

Each method takes the forms that c10d's callers use, for a Python override shadows every C++ overload of its name: an
options object by position or keyword, none, or the short forms (``pg.allreduce(tensor, op, timeout)``), whose
positional arguments stand one place before ours.

Synchronous collectives may go the fast path (transport.FastCollective), which takes plain CPU tensors in equal parts
straight to the core; of what it does not take it has done nothing, and the slow path (issuing.py) goes on. The table
below says for which, and what c10d's options say of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ..call import SHAPES, Op, seconds_of
from ..errors import UsageError
from ..lowering import only, own_list
from ..native import SLOW_PATH
from .issuing import FastPath, Issuing
from .torch_private import opaque_to_dynamo

if TYPE_CHECKING:
    from .work import DoneMessage, DoneWork, Work

    Issued = Work | DoneWork | None


def _list(lists: Any, name: str) -> Any:
    return own_list(lists) or []


def _as_it_is(tensors: Any, name: str) -> Any:
    return tensors


def _splits(*given: Any) -> list[list[Any]]:
    """Split sizes, in lists, tuples or arrays, none for None, as lists."""
    for each in given:
        if each is not None and (isinstance(each, Mapping) or not hasattr(each, "__getitem__")):
            raise UsageError(f"all_to_all_single: split sizes are a {type(each).__name__}, not a list of numbers")
    return [[] if each is None else list(each) for each in given]


class _Form:
    """An operation whose method is like others'. ``method``: c10d's name of it; ``name``: in profiles and errors, and
    the method of Lowering unless ``lower`` is; ``takes``: of c10d's output and input, or of what is both, what Lowering
    gets; ``more``: what it gets besides."""

    def __init__(self, method: str, name: str, takes: tuple[Any, ...], more: tuple[str, ...], lower: str = "") -> None:
        self.method, self.name, self.takes, self.more, self.lower = method, name, takes, more, lower or name

    def unpacked(self, tensors: Sequence[Any]) -> list[Any]:
        """Of c10d's output and input, or of what is both: what Lowering gets of them; and each as a list."""
        taken = [take(each, self.name) for take, each in zip(self.takes, tensors)]
        return [taken, *([each] if isinstance(each, torch.Tensor) else list(each or ()) for each in taken)]

    def each(self, tensors: Sequence[Any], more: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """Of several at once: what Lowering gets of each one, ``more`` among it; and all that is written."""
        outputs, *inputs = tensors
        if self.method == "allgather_coalesced":  # c10d passes, for each rank, one output for each input
            outputs = [[of_rank[i] for of_rank in outputs] for i in range(len(inputs[0]))]
        written = [t for each in outputs for t in (each if isinstance(each, list) else [each])]
        return [(*each, *more) for each in zip(outputs, *inputs, strict=True)], written


def _by_type(given: Sequence[Any]) -> tuple[Any, int, Any, timedelta | None]:
    """(options, root, reduce op, time-out) of what c10d's callers pass after the tensors, None among it. In the short
    forms one stands in another's place: what each is, its type says."""
    opts: Any = None
    op: Any = None
    root, timeout = 0, None
    for value in given:
        if hasattr(value, "asyncOp"):
            opts = value
        elif isinstance(value, timedelta):
            timeout = value
        elif isinstance(value, int):
            root = value
        elif value is not None:
            op = value
    if opts is not None:
        root, op = getattr(opts, "rootRank", root), getattr(opts, "reduceOp", op)
    return opts, root, ReduceOp.SUM if op is None else op, timeout


def fast_path(op: Op, options: type[Any]) -> FastPath:
    return op, options, SHAPES[op].rooted, SHAPES[op].reduces


_AS_THEY_ARE = _as_it_is, _as_it_is
_ALL_REDUCES = _Form("allreduce_coalesced", "all_reduce", (), ("op",))
_ALL_GATHERS = _Form("allgather_coalesced", "all_gather", (), ())
_ALL_GATHERS_SINGLE = _Form(
    "all_gather_single_coalesced", "all_gather_into_tensor_coalesced", (), (), "all_gather_single"
)
_REDUCE_SCATTERS_SINGLE = _Form(
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", (), ("op",), "reduce_scatter_single"
)
_ALL_TO_ALL_SINGLE = _Form("all_to_all_single", "all_to_all", _AS_THEY_ARE, (), "all_to_all_single")
_GATHER_SINGLE = _Form("gather_single", "gather_single", _AS_THEY_ARE, ("root",))
_BARRIER, _ALL_TO_ALL = fast_path(Op.barrier, BarrierOptions), fast_path(Op.all_to_all, AllToAllOptions)


def _given(*values: Any) -> Any:
    """What a caller has passed by one of the names that c10d has for it."""
    return next((value for value in values if value is not None), None)


def _named(operation: Any, method: str) -> Any:
    operation.__name__, operation.__qualname__ = method, f"ProcessGroup.{method}"
    return operation


def _of_one(op: Op, options: type[Any], method: str, *more: str) -> Any:
    """The method of an operation whose tensors are both input and output."""
    path, form = fast_path(op, options), _Form(method, op.name, (only,), more)

    def operation(
        self: Operations,
        tensors: Any = None,
        opts: Any = None,
        root: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        tensor: Any = None,
    ) -> Issued:
        if tensors is None:
            tensors = tensor
        if type(tried := self._fast(path, opts, tensors, tensors)) is not int:
            return tried
        return self._slowly(form, tried, (tensors,), opts, root, op, timeout)

    return _named(operation, method)


def _of_two(op: Op, options: type[Any], form: _Form) -> Any:
    """The method of an operation with an output and an input: a tensor, a list, or a list of lists."""
    path = fast_path(op, options)

    def operation(
        self: Operations,
        output: Any = None,
        input: Any = None,
        opts: Any = None,
        root: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        output_tensors: Any = None,
        input_tensors: Any = None,
        output_tensor: Any = None,
        input_tensor: Any = None,
        outputTensor: Any = None,
        inputTensor: Any = None,
    ) -> Issued:
        if output is None:
            output = _given(output_tensors, output_tensor, outputTensor)
        if input is None:
            input = _given(input_tensors, input_tensor, inputTensor)
        if type(tried := self._fast(path, opts, input, output)) is not int:
            return tried
        return self._slowly(form, tried, (output, input), opts, root, op, timeout)

    return _named(operation, form.method)


@opaque_to_dynamo
class Operations(Issuing):
    """What a ProcessGroup and a Backend of this package have in common."""

    def _slowly(
        self, form: _Form, tried: int, tensors: tuple[Any, ...], *given: Any, splits: tuple[list[int], ...] = ()
    ) -> Issued:
        """The operation of that form, which the fast path has not taken: ``tried``, what it has said; ``tensors``:
        output and input, or what is both; ``given``: what else c10d's caller has passed."""
        if tried == SLOW_PATH and self._by_torch(*tensors):
            return self._dispatched(form.method, *tensors, *splits, *given)
        return self._lowered_as(form, tried, tensors, given, splits)

    def _lowered_as(
        self, form: _Form, tried: int, tensors: tuple[Any, ...], given: Sequence[Any], splits: Sequence[Any] = ()
    ) -> Issued:
        opts, root, op, timeout = _by_type(given)
        taken, outputs, *inputs = self._lowered(form.unpacked, tensors)
        if form.method == "allreduce" and outputs[0].is_sparse:
            return self._sparse_all_reduce(outputs[0], op, opts, timeout)
        arguments = *taken, *splits, *(root if what == "root" else op for what in form.more)
        lower = getattr(self._lower, form.lower)
        return self._collective(
            form.name, opts, outputs, lower, [arguments], inputs[0] if inputs else None, timeout, tried, False
        )

    def _several(self, form: _Form, opts: Any, *tensors: Any) -> Issued:
        """An operation of that form with each of these outputs and inputs, or of what is both."""
        if self._by_torch(*tensors):
            return self._dispatched(form.method, *tensors, opts)
        op = [opts.reduceOp if opts is not None else ReduceOp.SUM for _ in form.more]
        arguments, written = self._lowered(form.each, tensors, op)
        lower, inputs = getattr(self._lower, form.lower), tensors[1] if len(tensors) > 1 else None
        return self._collective(form.name, opts, written, lower, arguments, inputs)

    broadcast = _of_one(Op.broadcast, BroadcastOptions, "broadcast", "root")
    allreduce = _of_one(Op.all_reduce, AllreduceOptions, "allreduce", "op")
    reduce = _of_one(Op.reduce, ReduceOptions, "reduce", "root", "op")
    allgather = _of_two(Op.all_gather, AllgatherOptions, _Form("allgather", "all_gather", (_list, only), ()))
    all_gather_single = _of_two(
        Op.all_gather,
        AllgatherOptions,
        _Form("all_gather_single", "_all_gather_base", _AS_THEY_ARE, (), "all_gather_single"),
    )
    reduce_scatter = _of_two(
        Op.reduce_scatter, ReduceScatterOptions, _Form("reduce_scatter", "reduce_scatter", (only, _list), ("op",))
    )
    reduce_scatter_single = _of_two(
        Op.reduce_scatter,
        ReduceScatterOptions,
        _Form("reduce_scatter_single", "_reduce_scatter_base", _AS_THEY_ARE, ("op",), "reduce_scatter_single"),
    )
    alltoall = _of_two(Op.all_to_all, AllToAllOptions, _Form("alltoall", "all_to_all", _AS_THEY_ARE, ()))
    gather = _of_two(Op.gather, GatherOptions, _Form("gather", "gather", (_list, only), ("root",)))
    scatter = _of_two(Op.scatter, ScatterOptions, _Form("scatter", "scatter", (only, _list), ("root",)))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Issued:
        return self._several(_ALL_REDUCES, opts, tensors)

    def allgather_coalesced(
        self, output_lists: Sequence[Any], input_list: Sequence[torch.Tensor], opts: Any = None
    ) -> Issued:
        return self._several(_ALL_GATHERS, opts, output_lists, input_list)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Issued:
        return self._several(_ALL_GATHERS_SINGLE, opts, outputs, inputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Issued:
        return self._several(_REDUCE_SCATTERS_SINGLE, opts, outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Issued:
        tried: Any = SLOW_PATH
        output_splits, input_splits = output_split_sizes, input_split_sizes
        if not type(output_splits) is type(input_splits) is list:
            output_splits, input_splits = self._lowered(_splits, output_splits, input_splits)
        if not output_splits and not input_splits:
            if type(tried := self._fast(_ALL_TO_ALL, opts, input, output)) is not int:
                return tried
        splits = output_splits, input_splits
        return self._slowly(_ALL_TO_ALL_SINGLE, tried, (output, input), opts, timeout, splits=splits)

    def gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: Any = None,
        root: Any = None,
        timeout: timedelta | None = None,
    ) -> Issued:
        if self._unlike_memory(output, input):
            return self._dispatched("gather_single", output, input, opts, root, timeout)
        return self._lowered_as(_GATHER_SINGLE, SLOW_PATH, (output, input), (opts, root, timeout))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Issued:
        given = getattr(opts, "device_ids", None) if torch.cuda.is_initialized() else None
        tried: Any = SLOW_PATH
        if not given and type(tried := self._fast(_BARRIER, opts)) is not int:
            return tried
        if tried == SLOW_PATH and self._by_torch():
            return self._dispatched("barrier", opts, timeout)
        opts, _, _, timeout = _by_type((opts, timeout))
        # For a group that has had CUDA tensors a barrier is one for the GPUs' work, too.
        devices = [*self._transport.devices(), *(torch.device("cuda", index) for index in (given or ())[:1])]
        device = devices[-1] if devices else None
        return self._collective("barrier", opts, [], self._lower.barrier, [(device,)], None, timeout, tried, False)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        if self._unlike_memory():
            self._dispatched("monitored_barrier", timeout or self._timeout, wait_all_ranks)
            return
        if self._monitored_barriers is None:
            from .monitored_barrier import MonitoredBarriers  # when wanted: an import takes its time at a rank's start

            self._monitored_barriers = MonitoredBarriers()
        seconds = self._seconds if timeout is None else seconds_of(timeout)
        self._monitored_barriers.run(self, seconds, wait_all_ranks)

    # Other names of the same operations: torch before 2.13 calls the first five (dist.all_gather_into_tensor the first,
    # or all_gather_single).
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
    allreduce_sparse = allreduce

    # --- point to point

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> Work | DoneMessage:
        return self._message("send", tensors, dstRank, tag, False)

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> Work | DoneMessage:
        return self._message("recv", tensors, srcRank, tag, True)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Work | DoneMessage:
        return self._message("recv", tensors, -1, tag, True)
