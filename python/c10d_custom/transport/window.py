"""What a window (c10d/window.py) asks of the way to the others' memory, and the tickets of its waits. There are two
ways: shm/window.py, where ranks reach it themselves, and message_window.py, where its owner takes in what they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import AbortedError, CustomBackendError, TransportError
from ..threads import lend, threading, time
from . import Ticket

if TYPE_CHECKING:
    import torch

    from ..call import Call
    from ..native.direct import CoreWindow

SLICE = 0.1  # s, after which a wait lets Python's signal handlers run


class RemoteMemory(ABC):
    """What all ranks of a group have registered with one window, as one of them reaches it. Ranks, offsets and tensors
    are checked by the caller. Signals of a peer are counted; each wait is for a number of its own.

    ``unified``: whether what is put is in the other's memory when `put` returns. ``fast``: what carries out common
    calls at once, or None. Raises PeerLostError, AbortedError, CustomBackendError of a group that is over."""

    unified: bool
    fast: CoreWindow | None = None

    @abstractmethod
    def put(self, peer: int, tensor: torch.Tensor, offset: int) -> None:
        """Writes a plain tensor ``offset`` items into the peer's. The tensor is the caller's again on return."""

    @abstractmethod
    def signal(self, peer: int) -> None:
        """Tells the peer of all that was put there before."""

    @abstractmethod
    def claim(self, peer: int) -> int:
        """Returns the number of the peer's next signal that nobody waits for."""

    @abstractmethod
    def give_back(self, peer: int, number: int) -> None:
        """Whoever has claimed it has not got it, and does not wait for it any more."""

    @abstractmethod
    def await_signal(self, peer: int, number: int, seconds: float) -> bool:
        """Waits up to ``seconds``, or looks once. Returns whether it has come."""

    @abstractmethod
    def map(self, rank: int) -> Any:
        """A writable buffer that is another rank's memory, for as long as anybody refers to it. UsageError where there
        is no such thing."""

    @abstractmethod
    def finish(self, run: Callable[[Call], None], seconds: float) -> None:
        """Returns when all that any rank has put is in this one's memory. Collective; ``run``: the group's."""


class SignalTicket(Ticket):
    """A wait for a signal of ``peer``, for up to ``seconds`` from the first wait. ``late``: makes the error of one that
    was too long, from its seconds; ``complete``: the group's."""

    def __init__(
        self,
        memory: RemoteMemory,
        peer: int,
        seconds: float,
        late: Callable[[float], BaseException],
        complete: Callable[[int], None],
    ) -> None:
        self._memory, self._peer, self._seconds, self._late, self._complete = memory, peer, seconds, late, complete
        self._lock = threading.RLock()
        self._since: float | None = None
        self._over = False
        self._error: BaseException | None = None
        self._number = memory.claim(peer)

    def _end(self, error: BaseException | None = None) -> None:
        with self._lock:
            if not self._over:
                self._error, self._over = error, True
                if error is not None:
                    self._memory.give_back(self._peer, self._number)

    def _look(self, seconds: float) -> bool:
        if not self._over:
            try:
                if self._memory.await_signal(self._peer, self._number, seconds):
                    self._end()
            except CustomBackendError as error:
                self._end(error.with_traceback(None))
        return self._over

    def done(self) -> bool:
        return self._look(0.0)

    def want(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        self.want()
        waited = time.monotonic() - (self._since or 0.0)
        if not self._look(max(min(seconds, self._seconds - waited), 0.0)) and waited >= self._seconds:
            self._end(self._late(waited))
        return self._over

    def error(self) -> BaseException | None:
        return self._error

    def watch(self, token: int) -> bool:
        if self.done():
            return False

        def look() -> None:
            while not self.wait(SLICE):
                pass
            self._complete(token)

        try:
            lend(look, "c10d_custom:window")
        except RuntimeError as error:
            raise TransportError(f"wait_signal: no thread for its future: {error} (ulimit -u)") from error
        return True

    def withdraw(self) -> None:
        self._end(AbortedError("wait_signal: a signal handler raised amid it; the window goes on"))

    def standing(self) -> tuple[str, str]:
        return "wait_signal", f"The group's rank {self._peer} has not signalled."

    @property
    def source(self) -> int:
        return self._peer
