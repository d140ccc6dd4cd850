"""What the ranks of a group tell each other through its Store while they make it, and the error that names who has not
come."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from ..errors import AbortedError, CollectiveMismatchError, CustomBackendError, PeerLostError, TransportError
from .processes import Processes

# Between two looks at the store: at first, and at most, for a group of few ranks and for each rank of more.
_FIRST, _MOST, _MOST_PER_RANK = 0.2e-3, 10e-3, 0.1e-3
# Rank 0 gives up sooner by this part of the time-out, and by this many seconds at most: the others then hear from it
# who is missing.
_SOONER, _SOONER_MOST = 0.1, 1.0
_HEARD_SECONDS = 10.0
_KINDS = {
    kind.__name__: kind for kind in (PeerLostError, CollectiveMismatchError, AbortedError)
}  # of an error told to others
_LOOK = 0.1  # s: between two calls of `look`


class Exchange:
    """One group's words, each said once; each wait has a deadline, and ends when a rank of this host has. Errors:
    TransportError; PeerLostError where a rank is known to have died; AbortedError where ranks have turned to something
    else. ``store``: a BoundedStore, or a Store that is sure to answer. ``look``: called now and then in long waits, and
    may raise."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        seconds: float,
        processes: Processes | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.processes = processes or Processes()
        self._look, self._next_look = look, self.started + _LOOK
        self._verdict_by = self.deadline - min(_SOONER_MOST, _SOONER * seconds)

    def left(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def say(self, key: str, value: Any) -> None:
        try:
            self.store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise self._store_lost(error) from error

    def hear(self, key: str, who: str, until: float | None = None) -> Any:
        """What was said under ``key``; ``who``: by whom, for the error."""
        try:
            if not self._until(lambda: self.store.check([key]), until or self.deadline):
                raise TransportError(
                    f"group creation: rank {self.rank} heard nothing from {who} for "
                    f"{time.monotonic() - self.started:.1f} s; did it start, and does it call "
                    "init_process_group (or new_group) with the same ranks?"
                )
            return json.loads(self.store.get(key))
        except RuntimeError as error:
            if isinstance(error, CustomBackendError):
                raise
            raise self._store_lost(error) from error

    def said(self, key: str) -> Any:
        """What has been said under ``key``, or None."""
        try:
            return json.loads(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError as error:
            raise self._store_lost(error) from error

    def is_over(self, topic: str) -> bool:
        """Whether that has been gathered and decided, or somebody has given up."""
        return self.store.check([f"{topic}/verdict"]) or self.store.check(["gave up"])

    def require_all_alive(self) -> None:
        if obituary := self.processes.obituary():
            raise PeerLostError(f"group creation, rank {self.rank}: {obituary}")

    def require_all_coming(self) -> None:
        self.require_all_alive()
        if why := self.processes.left_for():
            raise AbortedError(f"group creation, rank {self.rank}: {why}, and does not come")

    def gather_and_decide(
        self, topic: str, value: Any, decide: Callable[[list[Any]], Any], meet: Callable[[int, Any], None] | None = None
    ) -> Any:
        """Everyone gives ``value``; rank 0 calls ``decide`` on the list, and its outcome (or its error, as one) is
        everyone's. An error anywhere reaches every rank: rank 0, whose process often serves the store, returns (and may
        exit) only when all have heard. ``meet``: called with (rank, value) of those this rank is to wait for, as soon
        as they are there."""
        self.say(f"{topic}/{self.rank}", value)
        if self.rank:
            verdict = self._hear_verdict(topic, meet)
            self.say(f"{topic}/heard/{self.rank}", True)
        else:
            try:
                values = [value]
                for rank in range(1, self.size):
                    values.append(self.hear(f"{topic}/{rank}", f"rank {rank}", self._verdict_by))
                    if meet is not None:
                        meet(rank, values[-1])
                verdict = {"ok": decide(values)}
            except TransportError as error:
                verdict = {"error": f"{error}{self._silent(topic)}"}
            except PeerLostError as error:
                verdict = {"lost": f"{error}{self._silent(topic)}"}
            self.say(f"{topic}/verdict", verdict)
            self._all_heard(topic)
        if "lost" in verdict:
            raise PeerLostError(verdict["lost"])
        if "error" in verdict:
            raise TransportError(verdict["error"])
        return verdict["ok"]

    def _hear_verdict(self, topic: str, meet: Callable[[int, Any], None] | None) -> Any:
        try:
            if meet is not None:
                meet(0, self.hear(f"{topic}/0", "rank 0"))
            return self.hear(f"{topic}/verdict", "rank 0")
        except TransportError as error:
            cause = error
        raise TransportError(f"{cause}{self._silent(topic)}") from cause

    def _silent(self, topic: str) -> str:
        """Who has not come, for an error's end."""
        try:
            silent = [str(r) for r in range(self.size) if not self.store.check([f"{topic}/{r}"])]
        except RuntimeError:
            return ""
        return f" Not there yet: rank{'s' * (len(silent) > 1)} {', '.join(silent)}." if silent else ""

    def _until(self, there: Callable[[], object], until: float) -> bool:
        """False: not by ``until``. Raises PeerLostError if a rank has died meanwhile."""
        pause, most = _FIRST, max(_MOST, _MOST_PER_RANK * self.size)
        while not there():
            # What a rank was to say or to hear may be there by now, and its process ended in good order.
            if self.processes.ended() and there():
                return True
            self.require_all_coming()
            if pause == most and self.store.check(["gave up"]) and not there():
                raise self._given_up(json.loads(self.store.get("gave up")))
            if time.monotonic() >= until:
                return False
            if self._look is not None and time.monotonic() >= self._next_look:
                self._look()
                self._next_look = time.monotonic() + _LOOK
            time.sleep(pause)
            pause = min(1.5 * pause, most)
        return True

    def give_up(self, error: BaseException) -> None:
        """This rank says and hears no more: nobody need wait for it. ``error``: why."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"gave up/{self.rank}", "")
            self.store.set(
                "gave up", json.dumps({"rank": self.rank, "kind": type(error).__name__, "error": str(error)})
            )

    def _given_up(self, why: dict[str, Any]) -> CustomBackendError:
        kind = _KINDS.get(why["kind"], TransportError)
        return kind(f"group creation, rank {self.rank}: rank {why['rank']} gave up: {why['error'] or why['kind']}")

    def _all_heard(self, topic: str) -> None:
        # A rank that is lost here has no claim on the others' verdict: no error, and a short wait.
        until = time.monotonic() + min(_HEARD_SECONDS, self.left())
        pause, waiting = _FIRST, set(range(1, self.size))
        try:
            while waiting and time.monotonic() < until:
                waiting -= self.processes.ended()
                if not waiting or self.store.check([f"{topic}/heard/{r}" for r in waiting]):
                    return
                waiting -= {r for r in waiting if self.store.check([f"gave up/{r}"])}
                time.sleep(pause)
                pause = min(1.5 * pause, _MOST)
        except RuntimeError:
            pass

    def _store_lost(self, error: BaseException) -> CustomBackendError:
        if isinstance(error, TransportError):
            return error  # BoundedStore's says it all
        if obituary := self.processes.obituary():
            return PeerLostError(f"group creation, rank {self.rank}: {obituary} ({error})")
        return TransportError(
            f"group creation, rank {self.rank}: the store does not answer; has the process that serves "
            f"it (rank 0, often) ended? ({error})"
        )
