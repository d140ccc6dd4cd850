"""One-sided windows (docs/windows.md): what `ProcessGroup.new_window` returns, with the methods of torch 2.15's Window,
which is a class that Python cannot derive from.

Each rank registers a CPU tensor; the others write to it and signal it. Where all of them lie in memory that the ranks
of a host share, a rank writes there itself; else its puts are messages (transport/window.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from ctypes import addressof, create_string_buffer, sizeof
from typing import TYPE_CHECKING, Any

import torch

from .. import dtypes
from ..call import Call, Op, Region, seconds_of
from ..errors import CollectiveTimeoutError, UsageError
from ..lowering import is_plain
from ..native import OK, SLOW_PATH, TIMEOUT, direct
from ..threads import time
from ..transport.message_window import SentMemory
from ..transport.shm import ShmTransport
from ..transport.shm.window import Part, SharedMemory, place, take_signals
from ..transport.window import SignalTicket
from .torch_private import WindowAttr
from .work import DoneWork, Work

if TYPE_CHECKING:
    from ..transport import Transport
    from ..transport.window import RemoteMemory

_ROOM = 2048  # bytes of what a rank says of its tensor
_DONE = DoneWork([])


def new_window(group: Any, tensor: torch.Tensor | None) -> Window:
    """ProcessGroup.new_window; ``group``: an Issuing."""
    group._windows_made += 1
    window = Window(group, group._windows_made)
    if tensor is not None:
        window.tensor_register(tensor)
    return window


class _Said:
    """What a rank says of what it registers. ``refused``: why it does not, or ""."""

    def __init__(self, window: int, refused: str, dtype: str, shape: Sequence[int], data: int, signals: int) -> None:
        self.window, self.refused, self.dtype, self.shape = window, refused, dtype, shape
        self.data, self.signals = data, signals

    @property
    def items(self) -> int:
        return math.prod(self.shape)


class Window:
    """As torch 2.15's Window. Ranks are the group's. Made by `new_window`, on all ranks in the same order."""

    _fast: Any = None  # as of RemoteMemory, while something is registered
    _memory: RemoteMemory | None = None

    def __init__(self, group: Any, number: int) -> None:
        self._group, self._number = group, number
        self._all: list[_Said] = []
        self._tensor: Any = None

    # --- what is collective

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Lets the others write to ``tensor``, a contiguous CPU tensor, of any size and dtype on each rank. Collective.
        Where the group's ranks share memory its storage moves there, with all of its views, unless it is of
        `c10d_custom.empty`. It stays until all deregister, be it ``owning`` or not. UsageError on all ranks if one
        refuses its tensor."""
        if self._memory is not None:
            raise self._usage("tensor_register", "double registration: deregister its tensor first")
        transport, signals, error = self._group.cpu_transport, None, None
        said = _Said(self._number, "", "uint8", [], 0, 0)
        try:
            dtype = self._check("tensor_register", tensor)
            where, signals, at = _in_arena(transport, tensor)
            said = _Said(self._number, "", dtype.name, list(tensor.shape), where, at)
        except Exception as refusal:
            said.refused, error = str(refusal)[: _ROOM // 8] or repr(refusal), refusal
        everyone = self._tell(said)
        for rank, its in enumerate(everyone):
            if its.refused:
                why = f"rank {rank} refused its tensor: {its.refused}"
                raise error or self._usage("tensor_register", why)
        if len({its.window for its in everyone}) > 1:
            order = ", ".join(f"rank {r} its number {its.window}" for r, its in enumerate(everyone))
            raise self._usage(
                "tensor_register", f"the ranks register different windows ({order}); they make them in one order"
            )
        parts = [Part(_dtype(its.dtype), its.items, its.data, its.signals) for its in everyone]
        memory: RemoteMemory
        if all(p.data and p.signals for p in parts):
            assert isinstance(transport, ShmTransport)
            memory = SharedMemory(transport, parts)
        else:
            memory = SentMemory(transport, self._number, tensor.detach(), self._why_not_shared(parts))
        self._group._in_windows[self._number] = tensor, signals, memory
        self._all, self._tensor, self._memory, self._fast = everyone, tensor, memory, memory.fast

    def tensor_deregister(self) -> None:
        """Ends the registration. Collective: when it returns, all that others have put is in the tensor, and nobody
        writes to it any more."""
        memory = self._registered("tensor_deregister")
        self._fast = self._memory = None
        memory.finish(self._group._transport.run, self._group._seconds)
        self._group._in_windows.pop(self._number, None)
        self._tensor, self._all = None, []

    # --- what is one-sided

    def put(
        self, tensor: torch.Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool = False, opts: Any = None
    ) -> DoneWork:
        """Writes a contiguous ``tensor`` into what ``dst_rank`` has registered, from that element on. It may be changed
        when this returns. ``dst_rank`` sees it, at the latest, after it has waited for a signal that was sent later."""
        if self._fast is None or self._fast.put(tensor, dst_rank, target_offset_nelems) != OK:
            self._put(tensor, dst_rank, target_offset_nelems)
        return _DONE

    def _put(self, tensor: torch.Tensor, rank: int, offset: int) -> None:
        memory = self._registered("put")
        rank = self._rank("put", rank)
        dtype, its = self._check("put", tensor), self._all[rank]
        if dtype.name != its.dtype:
            raise self._usage(
                "put", f"the tensor is of torch.{dtype.name}, the window of rank {rank} of torch.{its.dtype}"
            )
        if offset < 0 or offset + tensor.numel() > its.items:
            raise self._usage(
                "put",
                f"{tensor.numel()} elements at offset {offset} exceeds the window size of rank {rank}, "
                f"{its.items} elements",
            )
        memory.put(rank, tensor.detach(), offset)

    def signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> DoneWork:
        """Signals ``peer_rank``, after all that this thread has put there."""
        if self._fast is None or self._fast.signal(peer_rank) != OK:
            memory = self._registered("signal")
            memory.signal(self._rank("signal", peer_rank))
        return _DONE

    def wait_signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> DoneWork | Work:
        """Waits for one signal of ``peer_rank``, each for one of its own. The time-out is the group's, or that of
        ``opts``; after it, the window goes on."""
        if self._fast is not None and not async_op and opts is None:
            began = time.monotonic()
            status = self._fast.wait(peer_rank, self._group._nanoseconds)
            if status == OK:
                return _DONE
            if status != SLOW_PATH:
                self._failed(self._rank("wait_signal", peer_rank), status, began)
        memory = self._registered("wait_signal")
        peer = self._rank("wait_signal", peer_rank)
        seconds = self._group._seconds if opts is None else seconds_of(opts.timeout)
        if seconds <= 0:
            seconds = self._group._seconds
        transport = self._group.cpu_transport
        ticket = SignalTicket(memory, peer, seconds, lambda waited: self._late(peer, waited), transport.complete)
        work = Work(self._group._completer, [ticket], [], None, None)
        if not async_op:
            work.wait()
            return _DONE
        self._group._completer.adopt(work, eager=False)
        return work

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """What ``rank`` has registered, as it is there: what one writes the other reads. UsageError over several hosts
        and where `get_attr` says SEPARATE, but for this rank's own."""
        memory = self._registered("map_remote_tensor")
        rank = self._rank("map_remote_tensor", rank)
        if rank == self._group._group_rank:
            return self._tensor
        its = self._all[rank]
        if memory.unified and not its.items:
            return torch.empty(its.shape, dtype=getattr(torch, its.dtype), device="cpu")
        buffer = memory.map(rank)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(getattr(torch, its.dtype)).view(its.shape)

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """``.access_type``: UNIFIED where a put is in that rank's memory at once, and `map_remote_tensor` shows it;
        SEPARATE where that rank sees puts when it waits for a signal."""
        memory = self._registered("get_attr")
        self._rank("get_attr", peer_rank)
        return WindowAttr(memory.unified)

    # --- errors, and what ranks tell each other

    def _call(self, name: str) -> str:
        return f"{name} of group {self._group._name}, rank {self._group._group_rank}"

    def _usage(self, name: str, what: str) -> UsageError:
        return UsageError(f"{self._call(name)}: {what}")

    def _registered(self, name: str) -> RemoteMemory:
        if self._memory is None:
            raise self._usage(name, "the window is not registered: call tensor_register first, on all ranks")
        return self._memory

    def _rank(self, name: str, rank: Any) -> int:
        if not isinstance(rank, int) or not 0 <= rank < self._group._group_size:
            raise self._usage(name, f"there is no rank {rank} in a group of {self._group._group_size}")
        return rank

    def _check(self, name: str, tensor: Any) -> dtypes.DType:
        if not isinstance(tensor, torch.Tensor):
            raise self._usage(name, f"expected a tensor, got {type(tensor).__name__}")
        if not tensor.is_cpu:
            raise self._usage(name, f"the tensor is on {tensor.device}: windows are of CPU tensors only")
        if tensor.layout is not torch.strided or direct.stands_for_another(tensor):
            raise self._usage(name, f"a {type(tensor).__name__} of {tensor.layout} has no memory of its own")
        if not is_plain(tensor):
            raise self._usage(name, "the tensor is not contiguous")
        return dtypes.lookup(tensor.dtype)

    def _failed(self, peer: int, status: int, began: float) -> None:
        memory = self._registered("wait_signal")
        assert isinstance(memory, SharedMemory)
        if status == TIMEOUT:
            raise self._late(peer, time.monotonic() - began)
        memory.check("wait_signal", status, peer, began)

    def _late(self, peer: int, waited: float) -> CollectiveTimeoutError:
        its = self._group.cpu_transport.peers()[peer]
        doing = f"is {its.state}, and has entered {'no collective' if its.calling == '-' else its.calling}"
        return CollectiveTimeoutError(
            f"{self._call('wait_signal')}: Timed out after {waited:.3f} s: rank {peer} has not signalled. Its process "
            f"({its.pid}) {doing}. The window and the group go on"
        )

    def _tell(self, said: _Said) -> list[_Said]:
        """What all ranks say, by rank."""
        group = self._group
        mine = create_string_buffer(json.dumps(vars(said), ensure_ascii=False).encode(), _ROOM)
        everyone = create_string_buffer(_ROOM * group._group_size)

        def region(index: int, of: Any) -> Region:
            return Region(addressof(of) + index * _ROOM, _ROOM, _ROOM)

        outputs = [region(r, everyone) for r in range(group._group_size)]
        byte = dtypes.BY_DTYPE[torch.uint8]
        call = Call(
            Op.all_gather, "tensor_register", byte, group._seconds, [region(0, mine)], outputs, count=sizeof(mine)
        )
        group._transport.run(call)
        texts = [everyone.raw[r * _ROOM : (r + 1) * _ROOM].rstrip(b"\0") for r in range(group._group_size)]
        return [_Said(**json.loads(text)) for text in texts]

    def _why_not_shared(self, parts: Sequence[Part]) -> str:
        if not isinstance(self._group.cpu_transport, ShmTransport):
            return "the group's ranks are on several hosts"
        ranks = [r for r, p in enumerate(parts) if not (p.data and p.signals)]
        return f"what ranks {ranks} have registered is not in memory that the ranks share (docs/windows.md says when)"


def _dtype(name: str) -> dtypes.DType:
    return dtypes.BY_DTYPE[getattr(torch, name)]


def _in_arena(transport: Transport, tensor: torch.Tensor) -> tuple[int, Any, int]:
    """Has the tensor lie in memory that the ranks share. (Its place there, the buffer of the signals to this rank, the
    place of that.) Places are 0 where this group or process has no such memory, or torch, before 2.12, cannot move
    it."""
    if not isinstance(transport, ShmTransport) or not transport.has_arena():
        return 0, None, 0
    signals, at = take_signals(transport)
    if not at:
        return 0, None, 0
    if not tensor.numel():
        return at, signals, at
    where = place(transport, tensor.data_ptr(), tensor.nbytes)
    if not where and _move(transport, tensor):
        where = place(transport, tensor.data_ptr(), tensor.nbytes)
    return where, signals, at


def _move(transport: Transport, tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    if not storage.resizable():
        raise UsageError(
            "tensor_register: the tensor's memory is another's (a numpy array's, a file's, torch.multiprocessing's): "
            "register a clone of it, or a tensor of c10d_custom.empty"
        )
    if not hasattr(storage, "_swap_data_ptr_"):
        return False
    buffer = transport.take(storage.nbytes())
    if buffer is None:
        return False
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    memory.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
    storage._swap_data_ptr_(memory.untyped_storage())
    return True
