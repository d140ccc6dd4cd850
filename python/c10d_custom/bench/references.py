"""What is timed side by side: c10d backends (one that does nothing among them), other libraries, the memory floor."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch.distributed as dist

from .. import empty
from ..c10d import meeting
from . import noop, windows
from .case import REDUCING, Reference, Unavailable, there_and_back
from .deepspeed_op import DeepSpeedOp
from .ranks import first_said
from .raw_mpi import RawMpi
from .values import zeros

if TYPE_CHECKING:
    from .case import Case
    from .operations import Buffers


class Backend(Reference):
    """A c10d backend, over all ranks."""

    def __init__(self, group: Any, checked: bool = True, barrier: Callable[[], object] | None = None) -> None:
        self.group, self.checked = group, checked
        self.barrier = barrier or partial(dist.barrier, group)
        self._registered = windows.Registered()

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        bound = {"windows": self._windows, "send_recv": self._send_recv}.get(case.operation, self._collective)
        return bound(case, buffers.source, buffers.target)

    def _call(self, case: Case, function: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], object]:
        if not case.asynchronous:
            return partial(function, *args, **options, group=self.group)
        start = partial(function, *args, **options, group=self.group, async_op=True)
        return lambda: start().wait()

    def _collective(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        def parts(whole: Any) -> Any:
            return None if whole is None else list(whole.chunk(case.size))

        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str | None]] = {
            "all_reduce": (dist.all_reduce, (target,), None),
            "broadcast": (dist.broadcast, (target,), "group_src"),
            "reduce": (dist.reduce, (target,), "group_dst"),
            "all_gather": (dist.all_gather_into_tensor, (target, source), None),
            "reduce_scatter": (dist.reduce_scatter_tensor, (target, source), None),
            "all_to_all": (dist.all_to_all_single, (target, source), None),
            "gather": (dist.gather, (source, parts(target)), "group_dst"),
            "scatter": (dist.scatter, (target, parts(source)), "group_src"),
        }
        function, tensors, root = calls[case.operation]
        options = {"op": getattr(dist.ReduceOp, str(case.redop))} if case.operation in REDUCING else {}
        if root is not None:
            options[root] = case.root
        return self._call(case, function, *tensors, **options)

    def _send_recv(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        if case.rank not in (0, case.size - 1):
            return lambda: None
        peer = case.size - 1 - case.rank
        send: Callable[[], object]
        recv: Callable[[], object]
        if case.asynchronous:

            def send() -> None:
                cast(dist.Work, dist.isend(target, group=self.group, group_dst=peer)).wait()

            def recv() -> None:
                cast(dist.Work, dist.irecv(target, group=self.group, group_src=peer)).wait()
        else:
            send = partial(dist.send, target, group=self.group, group_dst=peer)
            recv = partial(dist.recv, target, group=self.group, group_src=peer)
        return there_and_back(case.rank, send, recv)

    def _windows(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        return windows.ring(self._registered.renew(self.group, target), case, source, target)


_BYTES = 64 << 20  # copied between two barriers, at least: their cost must not count


class Floor(Reference):
    """The memory floor: all ranks copy the size's bytes, once, at the same time, from one private buffer to another. No
    collective whose ranks each read and write so many bytes can take less where memory is what limits it."""

    checked = False

    def __init__(self, barrier: Callable[[], object]) -> None:
        self.barrier = barrier

    def repeats(self, case: Case) -> int:
        """Copies in one call of the function; its time is divided by it. Ranks that outnumber the cores take turns, and
        only a barrier at the end shows how long all of them took."""
        return max(1, min(64, _BYTES // case.nbytes))

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], None]:
        source, target = zeros(case.count, case.dtype), zeros(case.count, case.dtype)
        to, of, size = target.data_ptr(), source.data_ptr(), case.nbytes
        times, barrier = self.repeats(case), self.barrier

        def copies(keep: object = (source, target)) -> None:
            for _ in range(times):
                ctypes.memmove(to, of, size)
            barrier()

        return copies


# Beside the backends that torch knows. "ucc" is torch's own, of which few builds of torch have it.
# "threads2": custom with two threads in each rank.
_THREADS = re.compile(r"threads([1-9]|[1-5]\d|6[0-4])")
_OTHERS = ("mpi", "deepspeed", "ucc", "floor", "empty", "store", noop.NAME)
MORE: dict[str, Callable[[int], Reference]] = {}  # from elsewhere: how to make one on so many hosts


class ZeroCopy(Backend):
    """custom, on tensors of c10d_custom.empty."""

    NAME = "empty"


def placed(reference: Reference, buffers: Buffers) -> Buffers:
    """Returns the buffers, moved to memory that ``reference`` can take."""
    if not isinstance(reference, ZeroCopy):
        return buffers
    source, target = (None if t is None else empty(t.shape, dtype=t.dtype) for t in (buffers.source, buffers.target))
    moved = replace(buffers, source=source, target=source if buffers.target is buffers.source else target)
    moved.clear()
    return moved


def known(name: str) -> bool:
    """Whether `make` knows it; whether it can be timed here is another matter."""
    return name in _OTHERS or name in MORE or _THREADS.fullmatch(name) is not None or dist.is_backend_available(name)


def make(names: Iterable[str], hosts: int) -> tuple[dict[str, Reference], dict[str, str]]:
    """({name: reference} of custom, the default group, and those of ``names`` that can be had here, {name: why not} of
    the others), on ranks over so many hosts. Collective over the default group."""
    references: dict[str, Reference] = {"custom": Backend(dist.group.WORLD)}
    missing = {}
    for name in names:
        reference = why = None
        try:
            reference = _made(name, hosts)
        except Unavailable as error:
            why = str(error)
        why = first_said(why)
        if reference is None or why is not None:
            missing[name] = why or ""
        else:
            references[name] = reference
    return references, missing


def _made(name: str, hosts: int) -> Reference:
    if threads := _THREADS.fullmatch(name):
        return Backend(_group_of_threads(threads[1]))
    if name in MORE:
        return MORE[name](hosts)
    match name:
        case "mpi":
            return RawMpi()
        case "deepspeed":
            return DeepSpeedOp(hosts)
        case "floor":
            return Floor(dist.barrier)
        case "store":
            return windows.Stores(dist.barrier)
        case ZeroCopy.NAME:
            return ZeroCopy(dist.group.WORLD)
        case noop.NAME:
            noop.register()
            return Backend(_group(name, hosts), checked=False, barrier=dist.barrier)
        case "ucc" if not dist.is_backend_available(name):
            raise Unavailable("this torch was built without UCC, as its wheels are: build torch with USE_UCC=1")
    return Backend(_group(name, hosts))


def _group_of_threads(threads: str) -> Any:
    meeting.configuration.cache_clear()
    try:
        with patch.dict(os.environ, {"C10D_CUSTOM_THREADS": threads}):
            return _group("custom", 1)
    finally:
        meeting.configuration.cache_clear()


def _group(name: str, hosts: int) -> Any:
    if name == "gloo" and hosts == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return dist.new_group(backend=name)
    except (RuntimeError, ValueError) as error:
        hint = (
            "; over several hosts gloo needs GLOO_SOCKET_IFNAME, the network interface that reaches the others"
            if name == "gloo" and hosts > 1 and "GLOO_SOCKET_IFNAME" not in os.environ
            else ""
        )
        raise Unavailable(f"no group of the backend {name!r}: {error}{hint}") from error
