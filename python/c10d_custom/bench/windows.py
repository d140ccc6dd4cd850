"""One-sided windows: a token once around all ranks, by put, signal and wait; and the same by bare stores and loads."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .case import Reference, Unavailable, there_and_back

if TYPE_CHECKING:
    from .case import Case
    from .operations import Buffers

_LOOKS = 20  # before a bare wait yields its core: some microseconds
_LONGEST = 30.0  # s, of a wait


def neighbours(case: Case) -> tuple[int, int]:
    """(whom this rank sends to, from whom it gets)."""
    return (case.rank + 1) % case.size, (case.rank - 1) % case.size


class Registered:
    """The window of a group's last case: the one before is deregistered, on all ranks alike."""

    def __init__(self) -> None:
        self._window: Any = None

    def renew(self, group: Any, target: torch.Tensor) -> Any:
        if not getattr(group, "supports_window", False):
            raise Unavailable("it has no windows of CPU tensors")
        if self._window is not None:
            self._window.tensor_deregister()
        self._window = group.new_window(target)
        return self._window


def ring(window: Any, case: Case, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """By a window in which each rank has registered its target."""
    to, of = neighbours(case)
    token = target if case.rank else source

    def send() -> None:
        window.put(token, to, 0)
        window.signal(to)

    return there_and_back(case.rank, send, lambda: window.wait_signal(of))


class Stores(Reference):
    """A copy and a store of a word to shared memory; who waits loads that word again and again. No protocol: what the
    cores and Python take."""

    def __init__(self, barrier: Callable[[], object]) -> None:
        if platform.machine() != "x86_64":
            raise Unavailable("bare stores come in their order on x86-64 only")
        self.barrier = barrier
        self._data, self._words = Registered(), Registered()

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.operation != "windows" or buffers.source is None or buffers.target is None:
            raise Unavailable("it is for windows only")
        group: Any = dist.group.WORLD
        to, _ = neighbours(case)
        word = torch.zeros(1, dtype=torch.int64)
        try:
            theirs = self._data.renew(group, buffers.target).map_remote_tensor(to)
            their_word = self._words.renew(group, word).map_remote_tensor(to)
        except ValueError as error:
            raise Unavailable(str(error)) from error
        told = ctypes.c_int64.from_address(their_word.data_ptr())
        seen = ctypes.c_int64.from_address(word.data_ptr())
        token = buffers.target if case.rank else buffers.source
        source, target, nbytes = token.data_ptr(), theirs.data_ptr(), case.nbytes
        times = 0

        def send() -> None:
            ctypes.memmove(target, source, nbytes)
            told.value += 1

        def await_one(keep: object = (theirs, their_word, word, token)) -> None:
            nonlocal times
            times += 1
            looks, until = 0, 0.0
            while seen.value < times:
                looks += 1
                if looks >= _LOOKS:
                    os.sched_yield()
                    until = until or time.monotonic() + _LONGEST
                    if time.monotonic() > until:
                        raise RuntimeError("a rank has not passed the token on")

        return there_and_back(case.rank, send, await_one)
