"""A window of ranks that cannot reach each other's memory: puts and signals are messages. The target takes them in, in
their sender's order, when it waits for a signal of that sender, and the rest when it deregisters; it need not be there
when they are sent, for the sender keeps a copy until they have gone.

A put is a head, on a tag of the window, and the bytes, on a tag of their own: so no order in which threads and signal
handlers post them mixes two puts up."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_char, c_int64, c_uint64, memmove, sizeof
from typing import TYPE_CHECKING, Any

import torch

from ..call import Call, Message, Op, Region, tag_of_window
from ..dtypes import BY_DTYPE
from ..errors import CollectiveTimeoutError, TransportError, UsageError
from ..threads import IDLE_WORKER, rest, threading, time
from .window import SLICE, RemoteMemory

if TYPE_CHECKING:
    from . import Ticket, Transport

_BYTE, _WORD = BY_DTYPE[torch.uint8], BY_DTYPE[torch.int64]
_EVER = 1e9  # s: a message waits as long as its window is there; waits for signals have time-outs of their own
_SIGNAL = 2**64 - 1  # as the bytes of a head
_OLDEST = 8  # messages that are looked at with each new one


class _Head(Structure):
    _fields_ = [("number", c_uint64), ("offset", c_uint64), ("bytes", c_uint64)]


class _Stream:
    """What goes to one peer and comes from it. ``come``: signals taken in; ``taken``: heads; ``ticket``: of the next
    head, or with ``amid`` of the bytes of the last; ``at_it``: whether a frame of the lock's owner takes in."""

    def __init__(self) -> None:
        self.numbers, self.claims, self.given_back = itertools.count(1), itertools.count(1), list[int]()
        self.sent: dict[Ticket, Any] = {}  # what is not known to have gone, and the memory it reads
        self.lock = threading.RLock()  # of what follows
        self.at_it = False
        self.come = self.taken = 0
        self.head = _Head()
        self.ticket: Ticket | None = None
        self.amid = False


class SentMemory(RemoteMemory):
    """``number``: the window's in its group, from 1; ``memory``: the registered tensor, plain; ``why``: nobody can
    reach into the others'."""

    unified = False

    def __init__(self, transport: Transport, number: int, memory: torch.Tensor, why: str) -> None:
        self._transport, self._number, self._memory, self._why = transport, number, memory, why
        self._streams = [_Stream() for _ in range(transport.size)]

    def _post(self, name: str, peer: int, number: int, data: Any, is_recv: bool) -> Ticket:
        message = Message(name, data, _BYTE, peer, tag_of_window(self._number, number), _EVER, is_recv)
        return self._transport.post(message)

    # --- the sender's side

    def _send(self, name: str, peer: int, offset: int, nbytes: int, data: Any = None) -> None:
        stream = self._streams[peer]
        self._forget_what_has_gone(stream)
        number = next(stream.numbers)
        head = _Head(number, offset, nbytes)
        stream.sent[self._post(name, peer, 0, _region(head), False)] = head
        if data is not None:
            stream.sent[self._post(name, peer, number, _region(data), False)] = data

    def _forget_what_has_gone(self, stream: _Stream) -> None:
        """Of the oldest; raises the error of one that has not. Other threads and signal handlers may be at it, too."""
        try:
            oldest = list(itertools.islice(stream.sent, _OLDEST))
        except RuntimeError:  # they are
            return
        for ticket in oldest:
            if not ticket.done():
                break
            stream.sent.pop(ticket, None)
            if (error := ticket.error()) is not None:
                raise error

    def put(self, peer: int, tensor: torch.Tensor, offset: int) -> None:
        nbytes, at = tensor.nbytes, offset * tensor.element_size()
        if peer == self._transport.rank:
            memmove(self._memory.data_ptr() + at, tensor.data_ptr(), nbytes)
        elif nbytes:
            copy = (c_char * nbytes)()
            memmove(copy, tensor.data_ptr(), nbytes)
            self._send("put", peer, at, nbytes, copy)

    def signal(self, peer: int) -> None:
        if peer == self._transport.rank:
            with self._streams[peer].lock:
                self._streams[peer].come += 1
        else:
            self._send("signal", peer, 0, _SIGNAL)

    # --- the target's

    def claim(self, peer: int) -> int:
        stream = self._streams[peer]
        try:
            return heapq.heappop(stream.given_back)
        except IndexError:
            return next(stream.claims)

    def give_back(self, peer: int, number: int) -> None:
        heapq.heappush(self._streams[peer].given_back, number)

    def await_signal(self, peer: int, number: int, seconds: float) -> bool:
        stream = self._streams[peer]
        return self._take_in(peer, lambda: stream.come >= number, seconds)

    def _take_in(self, peer: int, enough: Callable[[], bool], seconds: float) -> bool:
        """Takes in what comes from that rank until there is enough, for up to ``seconds``. Returns whether there is."""
        stream, began = self._streams[peer], time.monotonic()
        while not enough():
            left = seconds - (time.monotonic() - began)
            if peer == self._transport.rank:
                rest(IDLE_WORKER, time.monotonic() - began)
            elif stream.lock.acquire(timeout=max(left, 0.0)):
                try:
                    if stream.at_it:
                        raise self._transport.inside("wait_signal")
                    stream.at_it = True
                    try:
                        self._step(peer, stream, max(min(left, SLICE), 0.0))
                    finally:
                        stream.at_it = False
                finally:
                    stream.lock.release()
            if left <= 0:
                break
        return enough()

    def _step(self, peer: int, stream: _Stream, seconds: float) -> None:
        if stream.ticket is None:
            stream.ticket = self._post("wait_signal", peer, 0, _region(stream.head), True)
        if not stream.ticket.wait(seconds):
            return
        if (error := stream.ticket.error()) is not None:
            stream.ticket = None
            raise error
        head = stream.head
        if stream.amid:
            stream.amid, stream.ticket = False, None
        elif head.bytes == _SIGNAL:
            stream.come, stream.taken, stream.ticket = stream.come + 1, stream.taken + 1, None
        elif head.offset + head.bytes > self._memory.nbytes:
            raise TransportError(
                f"wait_signal of group {self._transport.name}: rank {peer} has put {head.bytes} bytes at "
                f"{head.offset}, beyond what this rank has registered"
            )
        else:
            into = Region(self._memory.data_ptr() + head.offset, head.bytes, head.bytes)
            data = self._post("wait_signal", peer, head.number, into, True)
            stream.ticket, stream.amid, stream.taken = data, True, stream.taken + 1

    def finish(self, run: Callable[[Call], None], seconds: float) -> None:
        began, size, me = time.monotonic(), self._transport.size, self._transport.rank
        mine, all_sent = (c_int64 * size)(), (c_int64 * (size * size))()
        for peer, stream in enumerate(self._streams):
            mine[peer] = next(stream.numbers) - 1
        parts = [Region(addressof(all_sent) + r * sizeof(mine), sizeof(mine), size) for r in range(size)]
        name = "tensor_deregister"
        run(Call(Op.all_gather, name, _WORD, seconds, [Region(addressof(mine), sizeof(mine), size)], parts, count=size))
        late: list[int] = []
        for peer, stream in enumerate(self._streams):
            due = 0 if peer == me else all_sent[peer * size + me]
            left = seconds - (time.monotonic() - began)

            def all_in(stream: _Stream = stream, due: int = due) -> bool:
                return stream.taken >= due and not stream.amid

            if not self._take_in(peer, all_in, left):
                late.append(peer)
        for peer, stream in enumerate(self._streams):
            if stream.ticket is not None:
                stream.ticket.withdraw()  # of a wait that has ended, for a head that does not come
            if not _all_done(list(stream.sent), seconds - (time.monotonic() - began)):
                late.append(peer)
        if late:
            raise CollectiveTimeoutError(
                f"{name} of group {self._transport.name}: what ranks {late} have put here, or this rank there, has not "
                f"arrived after {seconds:g} s"
            )

    def map(self, rank: int) -> Any:
        raise UsageError(
            f"map_remote_tensor of group {self._transport.name}: the memory of rank {rank} cannot be mapped here: "
            f"{self._why}. Use put and signal"
        )


def _region(of: Any) -> Region:
    return Region(addressof(of), sizeof(of), sizeof(of))


def _all_done(sent: Sequence[Ticket], seconds: float) -> bool:
    began = time.monotonic()
    for ticket in sent:
        while not ticket.wait(max(min(SLICE, seconds - (time.monotonic() - began)), 0.0)):
            if time.monotonic() - began >= seconds:
                return False
    return True
