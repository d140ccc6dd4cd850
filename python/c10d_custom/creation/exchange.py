"""What the ranks of a group tell each other through its Store while they make it, and the errors that name who has not
come, or came to another group.

Ranks that were given different members wait for each other in vain. So each that waits for long says under its global
rank which members it was given, looks at what the others say, and tells those that say another thing (`Membership`).
And for the end of an error: what the store tells of ranks that came elsewhere, by mistake."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from ..errors import CollectiveMismatchError, CustomBackendError, TransportError
from ..threads import NEWS, time, wait_until
from . import LOOK, Gathering, Processes
from .bounded_store import KEY

if TYPE_CHECKING:
    from torch.distributed import Store

    from .bounded_store import BoundedStore


# Between two looks at the store: at first, and at most, for a group of few ranks and for each rank of more. (A store
# that serves thousands takes so long to hear them all.)
_FIRST, _FIRST_PER_RANK = 0.2e-3, 3e-6
_MOST, _MOST_PER_RANK = 10e-3, 0.1e-3
_SOON, _SOON_PER_RANK = 1e-3, 0.05e-3  # for rank 0, which is alone and which all others wait for: see `_until`
_HEARD_SECONDS = 10.0
_GAVE_UP = "gave up"
_ABSENT = "(absent)"  # what nobody says: it is no JSON


def peek(store: Any, key: str) -> bytes | None:
    """What the store has under ``key``, or None. In one operation: between `check` and `get`, which waits, the key may
    be deleted."""
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


def life(store: Any, rank: int) -> int:
    """How many groups of one name ``rank`` has given up before this one. Of a group that was made in good order, the
    store holds nothing that could be mistaken for the next one's."""
    number = 0
    while any(why["rank"] == rank for why in _lines(peek(store, f"{number}/{_GAVE_UP}"))):
        number += 1
    return number


def _lines(appended: bytes | None) -> list[Any]:
    return [json.loads(line) for line in (appended or b"").splitlines()]


class Exchange(Gathering):
    """One group's words, each said once. ``store``: a BoundedStore, or a Store that is sure to answer.

    A rank's operations on the store are as many in a large group as in a small one, but for those that wait. What all
    have heard is deleted: of a group that has been made, the store holds nothing."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        seconds: float,
        processes: Processes | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(rank, size, seconds, processes, look)
        self.store = store
        self._pauses = max(_FIRST, _FIRST_PER_RANK * size), max(_MOST, _MOST_PER_RANK * size)
        self._own: list[str] = []  # keys that this rank is to delete: the others may still want to hear them
        self._unheard: list[str] = []  # the same of rank 0, of topics whose verdict not all are known to have heard

    def say(self, key: str, value: Any) -> None:
        """To who hears it before the next gather_and_decide."""
        self._own.append(key)
        self._set(key, value)

    def hear(
        self, key: str, who: str, meanwhile: Callable[[], None] | None = None, silent: Callable[[], str] = lambda: ""
    ) -> Any:
        """What was said under ``key``; ``who``: by whom, for the error; ``meanwhile``: called in long waits;
        ``silent``: gives the end of the error."""
        with self._answered():
            said = self._until(lambda: peek(self.store, key), self.deadline, self._pauses, meanwhile)
            if said is None:
                raise self._nothing_from(who, silent())
        return json.loads(said)

    def said(self, topic: str) -> dict[int, Any]:
        """{rank: its value} of those that have given theirs to gather_and_decide."""
        with self._answered():
            return dict(_lines(peek(self.store, f"{topic}/said")))

    def is_over(self, topic: str) -> bool:
        """Whether that has been gathered and decided, or somebody has given up."""
        return self.store.check([f"{topic}/verdict"]) or self.store.check([_GAVE_UP])

    def gather_and_decide(
        self,
        topic: str,
        value: Any,
        decide: Callable[[list[Any]], Any],
        meet: Callable[[int, Any], None] | None = None,
        heard_later: Callable[[Any], bool] = lambda decided: False,
    ) -> Any:
        """``heard_later``: whether rank 0 will know without the store that all have heard what was decided, and then
        calls `all_heard`."""
        self._heard_later = heard_later
        if meet is not None and self.rank == 0:
            self._set(f"{topic}/first", value)  # for `meet` of the others: of a large group, all of "said" is long
            self._unheard.append(f"{topic}/first")
        self._append(f"{topic}/said", [self.rank, value])
        decided = super().gather_and_decide(topic, value, decide, meet)
        self._delete(self._own)  # all have come to this topic, and heard what there was before it
        return decided

    def all_heard(self) -> None:
        self._delete(self._unheard)

    def _later(self, verdict: Any) -> bool:
        return "ok" in verdict and self._heard_later(verdict["ok"])

    def _announce(self, topic: str, verdict: Any) -> None:
        self._set(f"{topic}/verdict", verdict)
        self._unheard += [f"{topic}/{what}" for what in ("said", "verdict")]
        if self._later(verdict):
            return
        self._unheard.append(f"{topic}/heard")
        # This process often serves the store.
        if self._await_heard(topic):
            self.all_heard()

    def _gather(self, topic: str, value: Any, meet: Callable[[int, Any], None] | None) -> list[Any]:
        values: dict[int, Any] = {}

        def all_said() -> bytes | None:
            said = peek(self.store, f"{topic}/said")
            for rank, value in _lines(said)[len(values) :]:
                values[rank] = value
                if rank and meet is not None:
                    meet(rank, value)
            return said if len(values) == self.size else None

        with self._answered():
            there = self._until(all_said, self._verdict_by, self._pauses, soon=_SOON + _SOON_PER_RANK * self.size)
        if there is None:
            first = min(rank for rank in range(self.size) if rank not in values)
            raise self._nothing_from(f"rank {first}", self._silent(topic))
        return [values[rank] for rank in range(self.size)]

    def _hear_verdict(self, topic: str, value: Any, meet: Callable[[int, Any], None] | None) -> Any:
        met = meet is None

        def meet_rank_0() -> None:
            nonlocal met
            if not met and (first := peek(self.store, f"{topic}/first")) is not None:
                meet(0, json.loads(first))  # type: ignore[misc]
                met = True

        verdict = self.hear(f"{topic}/verdict", "rank 0", meet_rank_0, lambda: self._silent(topic))
        if not self._later(verdict):
            self._append(f"{topic}/heard", [self.rank])
        return verdict

    def _silent(self, topic: str) -> str:
        try:
            there = self.said(topic)
        except CustomBackendError:
            return ""
        return self._not_there([r for r in range(self.size) if r not in there])

    def _require_no_trouble(self, slow: bool) -> None:
        self.require_all_coming()
        if slow and (why := _lines(peek(self.store, _GAVE_UP))):
            raise self._given_up(why[0])

    def require_all_going_on(self) -> None:
        """In a wait for something else than the others' words, again and again: raises what those would."""
        if time.monotonic() < self._next_look:
            return self.require_all_coming()
        self._next_look = time.monotonic() + LOOK
        with self._answered():
            self._require_no_trouble(slow=True)

    def give_up(self, error: BaseException) -> None:
        self._last_word({"rank": self.rank, "kind": type(error).__name__, "error": str(error)})

    def complete(self) -> None:
        """If a rank may not have heard all yet, the next group of this name must not use the same keys. So this says,
        for every rank, that it gave up: by that `life` gives the next group other keys."""
        if self._unheard:
            why = {
                "kind": TransportError.__name__,
                "error": "not all ranks are known to have heard of an earlier group",
            }
            for rank in range(self.size):
                self._last_word({"rank": rank, **why})

    def _last_word(self, why: dict[str, Any]) -> None:
        """If the store is lost, nobody waits to hear why."""
        with contextlib.suppress(RuntimeError):
            self.store.append(_GAVE_UP, f"{json.dumps(why)}\n")

    def _await_heard(self, topic: str) -> bool:
        # A rank that is lost here has no claim on the others' verdict: no error, and a short wait.
        until = time.monotonic() + min(_HEARD_SECONDS, self.left())
        pause, waiting = _FIRST, set(range(1, self.size))
        try:
            while waiting:
                waiting -= self.processes.ended()
                waiting -= {rank for (rank,) in _lines(peek(self.store, f"{topic}/heard"))}
                if waiting and pause > _FIRST:
                    waiting -= {why["rank"] for why in _lines(peek(self.store, _GAVE_UP))}
                if waiting:
                    if time.monotonic() >= until or self.processes.left_for():
                        return False
                    time.sleep(pause)
                    pause = min(1.5 * pause, _MOST)
        except RuntimeError:
            return False
        return True

    # --- the store

    def _set(self, key: str, value: Any) -> None:
        with self._answered():
            self.store.set(key, json.dumps(value))

    def _append(self, key: str, value: Any) -> None:
        with self._answered():
            self.store.append(key, f"{json.dumps(value)}\n")

    def _delete(self, keys: list[str]) -> None:
        with self._answered():
            while keys:
                self.store.delete_key(keys[-1])
                keys.pop()


_AT_ONCE = 16  # ranks looked at in one look: a store serves all of them
_TOLD_SECONDS = 0.5


def digest_of(members: list[int]) -> str:
    """Under which those of the store's keys stand that are of ranks which mean this group."""
    return hashlib.sha256(_described(members).encode()).hexdigest()[:16]


def _described(members: list[int]) -> str:
    return ", ".join(map(str, members)) if members != list(range(len(members))) else f"0 to {len(members) - 1}"


class Membership:
    """``members``: the global ranks in the group's order; ``rank``: this one's place among them."""

    def __init__(self, store: BoundedStore, rank: int, members: list[int], name: str) -> None:
        self.store, self.me, self.members, self.name = store, members[rank], members, name
        self._next = 0
        self._telling = False  # only in a long wait: ranks that mean the same group need no word of this
        self._said, self.digest = _described(members), digest_of(members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._telling and (kind is None or not issubclass(kind, CollectiveMismatchError)):
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.store.delete_key(self._key(self.me))

    def look(self) -> None:
        """Raises CollectiveMismatchError if one of these members was given others, or one of others was given this."""
        if not self._telling:
            self._telling = True
            self.store.set(self._key(self.me), json.dumps(self._said))
        others = [m for m in self.members if m != self.me]
        some = [others[(self._next + i) % len(others)] for i in range(min(_AT_ONCE, len(others)))]
        self._next += len(some)
        said = {m: own for m in some if (own := self._read(m)[0]) is not None}
        differing = {m: text for m, text in said.items() if text != self._said}
        differing.update(self._read(self.me)[1])
        if not differing:
            return
        self._tell(differing)
        said.update(differing)
        said[self.me] = self._said
        table = "\n".join(f"  rank {m}: ranks {said[m]}" for m in sorted(said))
        raise CollectiveMismatchError(
            f"creation of group {self.name or '(unnamed)'}, rank {self.me}: the ranks were given different members:\n"
            f"{table}\nGive the same ranks, in the same order, on every rank."
        )

    def waiting(self) -> set[int]:
        """The members that have said so, as those do that wait for long."""
        return {m for m in self.members if self._read(m)[0] is not None}

    def _read(self, member: int) -> tuple[str | None, dict[int, str]]:
        """(the members it says that it was given, what others told it that they were): the key's first line, and the
        lines behind it. No first line: it has given up waiting."""
        own, *told = (peek(self.store, self._key(member)) or b"").split(b"\n")
        return json.loads(own) if own else None, dict(json.loads(line) for line in told)

    def _tell(self, others: Iterable[int]) -> None:
        for m in others:  # which may not have this one among its members, and would never look at what it says
            self.store.append(self._key(m), f"\n{json.dumps([self.me, self._said])}")
        # The process that serves the store may end with this error: let the others hear first.
        self.store.set(f"{self._key(self.me)}/told", "1")
        wait_until(lambda: all(peek(self.store, f"{self._key(m)}/told") for m in others), NEWS, _TOLD_SECONDS)

    @staticmethod
    def _key(member: int) -> str:
        return f"members/{member}"


_MORE_SIZES = 16  # sizes looked for, beside twice the group's own
_MOST_RANKS = 256  # ranks looked for


def elsewhere(given: Store, custom: BoundedStore, rank: int, size: int) -> str:
    """``given``: the store by which torch makes the group, for whatever backend; ``custom``: our part of it."""
    with contextlib.suppress(RuntimeError):
        others = [r for r in range(min(size, _MOST_RANKS)) if r != rank]
        at_gloo = [r for r in others if _came_with_gloo(custom.of(given), r)]
        if at_gloo:
            return (
                f" Rank{'s' * (len(at_gloo) > 1)} {', '.join(map(str, at_gloo))} came with another backend, gloo: give "
                "all ranks the same."
            )
        sizes = [s for s in range(1, 2 * size + _MORE_SIZES) if s != size and _has_announced(custom, s)] if rank else []
        if sizes:
            return (
                f" A rank 0 has made a group of {' and one of '.join(map(str, sizes))} ranks here, where this rank was "
                f"told {size}: give all of them the same size."
            )
    return ""


def _came_with_gloo(store: BoundedStore, rank: int) -> bool:
    """gloo's ranks say there how they are reached."""
    return peek(store.under("0"), f"{rank}") is not None


def _has_announced(store: BoundedStore, size: int) -> bool:
    return peek(store.under(digest_of(list(range(size)))), KEY) is not None
