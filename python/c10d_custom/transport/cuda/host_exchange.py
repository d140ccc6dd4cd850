"""What calls on CUDA tensors ask of a group's transport of CPU tensors, whose waits have deadlines and see the dead,
and of their GPU."""

from __future__ import annotations

import ctypes
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ... import dtypes
from ...call import Call, Message, Op, Region, changed
from ...errors import CollectiveTimeoutError, PeerLostError, TransportError
from .mappings import HANDLE_BYTES
from .stream_op import come_to, poll

if TYPE_CHECKING:
    from ...config import Config
    from ...errors import CustomBackendError
    from .. import Transport
    from .driver import Driver

_Asked = TypeVar("_Asked", Call, Message)

BYTES = dtypes.BY_DTYPE[torch.uint8]
_MOST_BYTES = 8192


@dataclass
class Place:
    """Where a group's calls on one GPU are done. ``cpu``: its transport of CPU tensors, a LocalTransport where all its
    ranks share a host; ``stream``: of its collectives."""

    cpu: Any
    driver: Driver
    config: Config
    stream: int

    def where(self, call: Call | Message | None = None, number: int = 0) -> str:
        """For an error of that call; None: of some call."""
        name = call.name if call is not None else "a call on CUDA tensors"
        return f"{name}{f' #{number}' if number else ''} of group {self.cpu.name or '(unnamed)'}, rank {self.cpu.rank}"

    def late(self, call: Call | Message, what: str) -> CustomBackendError:
        """The error for a GPU that takes too long; the group is over."""
        if self.cpu.broken():
            return PeerLostError(
                f"{self.where(call)}: the group is of no more use (a rank is gone, or a call has "
                f"failed), and {self.driver.device} has not finished {what}."
            )
        self.cpu.abort()
        stream_op: Any = call.stream_op
        return CollectiveTimeoutError(
            f"{self.where(call)}: Timed out after {time.monotonic() - stream_op.began:.3f} s. {self.driver.device} "
            f"has not finished {what}; does a kernel wait for something that does not come?"
        )

    def came(self, call: Call, event: int, seconds: float, what: str) -> bool:
        """Waits until it has come there on the GPU. Raises `late`; False if the group is over: ``cpu`` says why."""
        came = poll(functools.partial(self.driver.done, event), time.monotonic() + seconds, self.cpu.broken)
        if not came and not self.cpu.broken():
            raise self.late(call, what)
        return came

    def offer(self, nbytes: int, seconds: float) -> tuple[int, bytes]:
        """GPU memory for others to open: its address here and its handle, which it begins with: by that they know
        it."""
        address = self.driver.allocate(nbytes)
        try:
            handle = self.driver.export_memory(address)
            self.lies(address, HANDLE_BYTES, seconds, handle)
        except BaseException:
            self.driver.free(address)
            raise
        return address, handle

    def open_offered(self, handle: bytes, seconds: float) -> int:
        """The address here of memory that another process offers."""
        address = self.driver.open_memory(handle)
        try:
            if self.lies(address, HANDLE_BYTES, seconds) != handle:
                raise TransportError("what another rank has written in its GPU memory is not read here")
        except BaseException:
            self.driver.close_memory(address)
            raise
        return address

    def lies(self, address: int, nbytes: int, seconds: float, data: bytes = b"") -> bytes:
        """What lies there, once ``data``, if any, does. Not on a stream that may be behind others' work."""
        pinned, stream = self.driver.allocate_pinned(nbytes), self.driver.create_stream()
        ctypes.memmove(pinned, data, len(data))
        self.driver.copy(stream, *((address, pinned) if data else (pinned, address)), nbytes)
        if not come_to(self.driver, stream, time.monotonic() + seconds, self.cpu.broken):
            raise TransportError(f"a copy of {nbytes} bytes took longer than {seconds:g} s")
        found = ctypes.string_at(pinned, nbytes)
        self.driver.destroy_stream(stream)
        self.driver.free_pinned(pinned)
        return found


def for_cpu(asked: _Asked, **changes: Any) -> _Asked:
    """The same of memory of the host's."""
    return changed(asked, device=None, stream_op=None, copy_back=[], **changes)


def tell(cpu: Transport, name: str, seconds: float, mine: bytes) -> list[bytes]:
    """Every rank's bytes, as many on all ranks, amid a call. ``name``: for errors. One of the group's collectives:
    raises as `run`."""
    n, size = cpu.size, len(mine)
    own = ctypes.create_string_buffer(mine, size)
    table = ctypes.create_string_buffer(n * size)
    base = ctypes.addressof(table)
    cpu.run(
        Call(
            Op.all_gather,
            name,
            BYTES,
            seconds,
            count=size,
            inputs=[Region(ctypes.addressof(own), size, size)],
            outputs=[Region(base + r * size, size, size) for r in range(n)],
        )
    )
    return [table.raw[r * size : (r + 1) * size] for r in range(n)]


def tell_json(cpu: Transport, name: str, seconds: float, mine: Any) -> list[Any]:
    """The same of what JSON can say, in up to _MOST_BYTES."""
    data = json.dumps(mine).encode()
    if len(data) > _MOST_BYTES:
        raise TransportError(f"{name}: {len(data)} bytes to tell, {_MOST_BYTES} at most")
    return [json.loads(said) for said in tell(cpu, name, seconds, data.ljust(_MOST_BYTES))]


def together(
    cpu: Transport, name: str, seconds: Callable[[], float], step: Callable[[], Any]
) -> tuple[list[Any] | None, str | None]:
    """Every rank takes a step. (What it gave on each, None), or (None, what went wrong first)."""
    gave, problem = None, None
    try:
        gave = step()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"[:500]
    said = tell_json(cpu, name, seconds(), [gave, problem])
    problem = next((f"rank {r}: {p}" for r, (_, p) in enumerate(said) if p), None)
    return (None, problem) if problem else ([g for g, _ in said], None)
