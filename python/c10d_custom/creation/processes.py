"""Which ranks have ended, while their group is being made: of this host, or of those that the group it is made from
knows. Once it is made, its transport watches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..threads import select


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
        if pid in (self._pids.get(rank), os.getpid()):
            return
        if rank in self._pids:
            self._forget(rank)  # its process was started again, and has come in the former's place
        self._pids[rank] = pid
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            # In this order: the PID cannot have passed to another process between the two looks.
            if started(pid) == start:
                self._ranks[fd] = rank
                self._poll.register(fd, select.POLLIN)
            else:
                os.close(fd)

    def _forget(self, rank: int) -> None:
        for fd in [fd for fd, of in self._ranks.items() if of == rank]:
            self._poll.unregister(fd)
            os.close(fd)
            del self._ranks[fd]
        self._ended.discard(rank)

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
        """What Members asks of a group's transport: see Transport of transport/base.py."""

        def gone(self) -> dict[int, str]: ...

        def shrinking(self) -> list[int]: ...


class Members(Processes):
    """Of a group that is made by some ranks of another: they are known before they have told who they are.
    ``parent``: that group's transport; ``ranks``: theirs in it; ``shrinking``: whether its shrink_group ends all
    this."""

    def __init__(self, parent: Parent, ranks: Sequence[int], shrinking: bool = False) -> None:
        super().__init__()
        self._parent, self._in_parent, self._shrinking = parent, ranks, shrinking

    def add(self, rank: int, pid: int, start: int | None) -> None:
        """Does nothing: the parent knows that rank."""

    def _gone(self) -> dict[int, str]:
        gone = self._parent.gone()
        return {rank: gone[r] for rank, r in enumerate(self._in_parent) if r in gone} if gone else {}

    def ended(self) -> set[int]:
        return set(self._gone())

    def obituary(self) -> str:
        return "; ".join(f"{self._name(rank)} {fate}" for rank, fate in self._gone().items())

    def _name(self, rank: int) -> str:
        global_rank = self._in_parent[rank]
        return f"rank {rank}" if rank == global_rank else f"rank {rank} (global rank {global_rank})"

    def left_for(self) -> str | None:
        if self._shrinking and (ranks := self._parent.shrinking()):
            return f"{', '.join(f'rank {rank}' for rank in ranks)} called shrink_group"
        return None
