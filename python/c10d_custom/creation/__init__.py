"""How the ranks of a group meet before there is a transport: who they are, where, whether they are alive, what they
tell each other.

Here: how they decide something together, whatever carries their words: exchange.py has those that go through the store,
local_datagrams.py those from process to process. And which of them have ended meanwhile: ranks of this host, or of
those that the group it is made from knows. Once it is made, its transport watches."""

from __future__ import annotations

import contextlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import AbortedError, CollectiveMismatchError, CustomBackendError, PeerLostError, TransportError
from ..threads import NEWS, select, time, wait_until


def started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: with its PID, what no other process ever has. None: there is
    none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class Processes:
    """``who``: how error messages call a rank; ``left_for``: why ranks that are alive will not come either, or None;
    ``fates``: {rank: what has become of it, for an error} of ends that somebody else has heard of: where there are
    any, errors name these alone. Ranks that cannot be seen from here, on other hosts or in other PID namespaces, count
    as alive."""

    def __init__(
        self,
        who: Callable[[int], str] = "rank {}".format,
        left_for: Callable[[], str | None] = lambda: None,
        fates: Callable[[], dict[int, str]] = dict,
    ) -> None:
        self._who, self.left_for, self.fates = who, left_for, fates
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # pidfd -> rank
        self._pids: dict[int, int] = {}
        self._ended: set[int] = set()

    def add(self, rank: int, pid: int, start: int | None) -> bool:
        """False: it has ended before, and counts as one that cannot be seen."""
        if pid in (self._pids.get(rank), os.getpid()):
            return True
        if rank in self._pids:
            self._forget(rank)  # its process was started again, and has come in the former's place
        self._pids[rank] = pid
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            return not isinstance(error, ProcessLookupError)
        # In this order: the PID cannot have passed to another process between the two looks.
        if started(pid) != start:
            os.close(fd)
            return False
        self._ranks[fd] = rank
        self._poll.register(fd, select.POLLIN)
        return True

    def _forget(self, rank: int) -> None:
        for fd in [fd for fd, of in self._ranks.items() if of == rank]:
            self._poll.unregister(fd)
            os.close(fd)
            del self._ranks[fd]
        self._ended.discard(rank)

    def ended(self) -> set[int]:
        """The ranks that have ended."""
        if self._ranks:
            self._ended.update(self._ranks[fd] for fd, _ in self._poll.poll(0))
        return self._ended | self.fates().keys()

    def obituary(self) -> str:
        ended = self.ended()
        fates = self.fates() or {rank: f"(pid {self._pids[rank]}) has died" for rank in sorted(ended)}
        return "; ".join(f"{self._who(rank)} {fate}" for rank, fate in fates.items())

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._ranks = {}


# Rank 0 gives up sooner by this part of the time-out, and by this many seconds at most: the others then hear from it
# who is missing.
_SOONER, _SOONER_MOST = 0.1, 1.0
_PART = 0.05  # of the time it has waited: see `_until`
LOOK = 0.1  # s: between two calls of `look`
_MEANWHILE = 5e-3  # s: until the first call of `meanwhile`; then each time that a wait has become twice as long
_OBITUARY = 0.6  # s
_KINDS = {
    kind.__name__: kind for kind in (PeerLostError, CollectiveMismatchError, AbortedError)
}  # of an error told to others


class Gathering(ABC):
    """One rank's part in the talk by which a group is made. Each wait has a deadline, and ends at once when a rank of
    this host is found to have died. Errors:
    TransportError; PeerLostError where a rank is known to have died; AbortedError where ranks have turned to something
    else. ``look``: called now and then in long waits, and may raise."""

    def __init__(
        self, rank: int, size: int, seconds: float, processes: Processes | None, look: Callable[[], None] | None
    ) -> None:
        self.rank, self.size = rank, size
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.processes = processes or Processes()
        self.look, self._next_look = look, self.started + LOOK
        self.sleep: Callable[[float], object] = time.sleep  # may end sooner, where there is likely news
        self._verdict_by = self.deadline - min(_SOONER_MOST, _SOONER * seconds)
        self.ruled_out = False  # whether all ranks have come, and there can be no group of them

    def left(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def require_all_coming(self) -> None:
        if obituary := self.processes.obituary():
            raise PeerLostError(f"group creation, rank {self.rank}: {obituary}")
        if why := self.processes.left_for():
            raise AbortedError(f"group creation, rank {self.rank}: {why}, and does not come")

    def gather_and_decide(
        self, topic: str, value: Any, decide: Callable[[list[Any]], Any], meet: Callable[[int, Any], None] | None = None
    ) -> Any:
        """Everyone gives ``value``; rank 0 calls ``decide`` on the list, and its outcome (or its error, as one) is
        everyone's. An error anywhere reaches every rank: rank 0 returns (and its process may exit) only when nobody
        needs it to hear the outcome. ``meet``: called with (rank, value) of those this rank is to wait for, as soon as
        they are there."""
        if self.rank:
            verdict = self._hear_verdict(topic, value, meet)
        else:
            try:
                values = self._gather(topic, value, meet)
            except TransportError as error:
                verdict = {"error": str(error)}
            except PeerLostError as error:
                silent = self._silent(topic) if self.processes.ended() else ""  # else a rank has given up, and said why
                verdict = {"lost": f"{error}{'.' if silent else ''}{silent}"}
            else:
                verdict = self._decided(decide, values)
            self._announce(topic, verdict)
        self.ruled_out = "ruled out" in verdict
        if "lost" in verdict:
            raise PeerLostError(verdict["lost"])
        if "error" in verdict:
            raise TransportError(verdict["error"])
        return verdict["ok"]

    @staticmethod
    def _decided(decide: Callable[[list[Any]], Any], values: list[Any]) -> dict[str, Any]:
        """Rank 0's verdict, once every value has come: what ``decide`` returns, or its error."""
        try:
            return {"ok": decide(values)}
        except TransportError as error:
            return {"error": str(error), "ruled out": True}
        except PeerLostError as error:
            return {"lost": str(error)}

    @abstractmethod
    def give_up(self, error: BaseException) -> None:
        """This rank says and hears no more: nobody need wait for it. ``error``: why."""

    @abstractmethod
    def complete(self) -> None:
        """Called once the group is made."""

    @abstractmethod
    def _hear_verdict(self, topic: str, value: Any, meet: Callable[[int, Any], None] | None) -> Any:
        """On ranks other than 0: gives ``value``, and returns rank 0's verdict."""

    @abstractmethod
    def _gather(self, topic: str, value: Any, meet: Callable[[int, Any], None] | None) -> list[Any]:
        """On rank 0: every rank's value, until _verdict_by."""

    @abstractmethod
    def _announce(self, topic: str, verdict: Any) -> None:
        """On rank 0: tells all others the verdict."""

    @abstractmethod
    def _require_no_trouble(self, slow: bool) -> None:
        """Raises the error of ranks that do not come. ``slow``: this wait looks seldom by now."""

    @abstractmethod
    def _silent(self, topic: str) -> str:
        """Who has not come, for an error's end."""

    def _until(
        self,
        found: Callable[[], Any],
        until: float,
        pauses: tuple[float, float],
        meanwhile: Callable[[], None] | None = None,
        soon: float = math.inf,
    ) -> Any:
        """What ``found`` returns, once it is not None; None: not by ``until``. Raises what `_require_no_trouble` does.
        ``pauses``: between two looks, at first and at most; no more than ``soon``, or a part of the time that has been
        waited. ``meanwhile``: called in long waits."""
        pause, most = pauses
        now = time.monotonic()
        next_check, next_word = now + pause, now + _MEANWHILE
        while (what := found()) is None:
            self.sleep(pause)
            # However much comes, of which this rank may want nothing.
            if (now := time.monotonic()) < next_check:
                continue
            try:
                self._require_no_trouble(pause == most)
            except CustomBackendError:
                # What a rank was to say or to hear may be there by now, and its process ended in good order.
                if (what := found()) is None:
                    raise
                return what
            if now >= until:
                return found()
            if meanwhile is not None and now >= next_word:
                meanwhile()
                next_word = now + min(now - self.started, LOOK)
            self._look()
            pause = min(1.5 * pause, most, max(soon, _PART * (now - self.started)))
            next_check = now + pause
        return what

    def _look(self) -> None:
        """Now and then, at what a long wait may have to hear of."""
        if self.look is None or time.monotonic() < self._next_look:
            return
        with self._answered():
            self.look()
        self._next_look = time.monotonic() + LOOK

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        """Around operations on the store: what is raised if it does not answer."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CustomBackendError):
                raise
            raise self._store_lost(error) from error

    def _store_lost(self, error: BaseException) -> CustomBackendError:
        # Who serves it may have died, and the word of that come later.
        if obituary := wait_until(self.processes.obituary, NEWS, min(_OBITUARY, self.left())):
            return PeerLostError(f"group creation, rank {self.rank}: {obituary} ({error})")
        return TransportError(
            f"group creation, rank {self.rank}: the store does not answer; has the process that serves "
            f"it (rank 0, often) ended? ({error})"
        )

    def _nothing_from(self, who: str, silent: str = "") -> TransportError:
        """The error of a rank that has heard nothing from ``who``; ``silent``: what `_silent` says."""
        return TransportError(
            f"group creation: rank {self.rank} heard nothing from {who} for {time.monotonic() - self.started:.1f} s; "
            f"did it start, and does it call init_process_group (or new_group) with the same ranks?{silent}"
        )

    def _not_there(self, silent: list[int]) -> str:
        dead = self.processes.ended()
        if not (silent := [rank for rank in silent if rank not in dead]):
            return ""
        return f" Not there yet: rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}."

    def _given_up(self, why: dict[str, Any]) -> CustomBackendError:
        kind = _KINDS.get(why["kind"], TransportError)
        return kind(f"group creation, rank {self.rank}: rank {why['rank']} gave up: {why['error'] or why['kind']}")
