"""Which ranks of this host have ended, while their group is being made. Once it is, the native core watches."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol


def started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: with its PID, what no other process ever has. None: there is
    none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class Processes:
    """``who``: how error messages call a rank; ``left_for``: why ranks that are alive will not come either, or None.
    Those that cannot be seen from here, on other hosts or in other PID namespaces, count as alive."""

    def __init__(
        self, who: Callable[[int], str] = "rank {}".format, left_for: Callable[[], str | None] = lambda: None
    ) -> None:
        self._who, self._left_for = who, left_for
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # pidfd -> rank
        self._pids: dict[int, int] = {}
        self._ended: set[int] = set()

    def add(self, rank: int, pid: int, start: int | None) -> None:
        if rank in self._pids or pid == os.getpid():
            return
        self._pids[rank] = pid
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            # In this order: the PID cannot have passed to another process between the two looks.
            if started(pid) == start:
                self._ranks[fd] = rank
                self._poll.register(fd, select.POLLIN)
            else:
                os.close(fd)

    def ended(self) -> set[int]:
        """The ranks that have."""
        if self._ranks:
            self._ended.update(self._ranks[fd] for fd, _ in self._poll.poll(0))
        return self._ended

    def obituary(self) -> str:
        return "; ".join(f"{self._who(rank)} (pid {self._pids[rank]}) has died" for rank in sorted(self.ended()))

    def left_for(self) -> str | None:
        return self._left_for()

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._ranks = {}


if TYPE_CHECKING:

    class Parent(Protocol):
        """What Members asks of a group's transport: see LocalTransport of transport/base.py."""

        who: Callable[[int], str]

        def states(self, sequence: int) -> list[Any] | None: ...

        def roll(self, round: int) -> tuple[dict[int, int], list[int]]: ...


class Members(Processes):
    """Of a group that is made by some ranks of another, on one host: they are known before they have told who they are.
    ``parent``: that group's transport; ``ranks``: theirs in it; ``roll``: whether its roll call (shrink_group) ends all
    this."""

    def __init__(self, parent: Parent, ranks: Sequence[int], roll: bool = False) -> None:
        super().__init__()
        self._parent, self._in_parent, self._roll = parent, ranks, roll

    def add(self, rank: int, pid: int, start: int | None) -> None:
        """They are known."""

    def _states(self) -> list[Any]:
        states = self._parent.states(0) or []  # none: closed
        return [states[r] for r in self._in_parent] if states else []

    def ended(self) -> set[int]:
        return {rank for rank, state in enumerate(self._states()) if not state.alive}

    def obituary(self) -> str:
        return "; ".join(
            f"{self._who(rank)} (pid {state.pid}) has died, or left the group that this one is made from"
            for rank, state in enumerate(self._states())
            if not state.alive
        )

    def left_for(self) -> str | None:
        if self._roll and (present := self._parent.roll(1)[0]):
            return f"{', '.join(map(self._parent.who, present))} called shrink_group"
        return None
