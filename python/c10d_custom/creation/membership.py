"""Whether the ranks of a group that is being made mean the same group.

Ranks that were given different members wait for each other in vain. So each that waits for long says under its global
rank which members it was given, and looks at what the others say. And for the end of an error: what the store tells of
ranks that came to another group, by mistake."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, Self

from ..errors import CollectiveMismatchError
from ..threads import time
from .bounded_store import KEY
from .exchange import peek

if TYPE_CHECKING:
    from torch.distributed import Store

    from .bounded_store import BoundedStore


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
        """Raises CollectiveMismatchError if one of these members was given others."""
        if not self._telling:
            self._telling = True
            self.store.set(self._key(self.me), json.dumps(self._said))
        others = [m for m in self.members if m != self.me]
        some = [others[(self._next + i) % len(others)] for i in range(min(_AT_ONCE, len(others)))]
        self._next += len(some)
        texts = {m: peek(self.store, self._key(m)) for m in some}
        said: dict[int, str] = {m: json.loads(text) for m, text in texts.items() if text is not None}
        differing = [m for m, text in said.items() if text != self._said]
        if not differing:
            return
        self._tell(differing)
        said[self.me] = self._said
        table = "\n".join(f"  rank {m}: ranks {said[m]}" for m in sorted(said))
        raise CollectiveMismatchError(
            f"creation of group {self.name or '(unnamed)'}, rank {self.me}: the ranks were given different members:\n"
            f"{table}\nGive the same ranks, in the same order, on every rank."
        )

    def waiting(self) -> set[int]:
        """The members that have said so, as those do that wait for long."""
        return {m for m in self.members if peek(self.store, self._key(m)) is not None}

    def _tell(self, others: list[int]) -> None:
        # The process that serves the store may end with this error: let the others hear first.
        self.store.set(f"{self._key(self.me)}/told", "1")
        until = time.monotonic() + _TOLD_SECONDS
        while time.monotonic() < until and not all(peek(self.store, f"{self._key(m)}/told") for m in others):
            time.sleep(5e-3)

    @staticmethod
    def _key(member: int) -> str:
        return f"members/{member}"


_MORE = 16  # sizes looked for, beside twice the group's own
_MOST = 256  # ranks looked for


def elsewhere(given: Store, custom: BoundedStore, rank: int, size: int) -> str:
    """``given``: the store by which torch makes the group, for whatever backend; ``custom``: our part of it."""
    with contextlib.suppress(RuntimeError):
        others = [r for r in range(min(size, _MOST)) if r != rank]
        at_gloo = [r for r in others if _came_with_gloo(custom.of(given), r)]
        if at_gloo:
            return (
                f" Rank{'s' * (len(at_gloo) > 1)} {', '.join(map(str, at_gloo))} came with another backend, gloo: give "
                "all ranks the same."
            )
        sizes = [s for s in range(1, 2 * size + _MORE) if s != size and _announced(custom, s)] if rank else []
        if sizes:
            return (
                f" A rank 0 has made a group of {' and one of '.join(map(str, sizes))} ranks here, where this rank was "
                f"told {size}: give all of them the same size."
            )
    return ""


def _came_with_gloo(store: BoundedStore, rank: int) -> bool:
    """gloo's ranks say there how they are reached."""
    return peek(store.under("0"), f"{rank}") is not None


def _announced(store: BoundedStore, size: int) -> bool:
    return peek(store.under(digest_of(list(range(size)))), KEY) is not None
