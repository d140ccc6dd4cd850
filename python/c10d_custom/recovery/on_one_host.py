"""Which ranks of a default group on one host are left, and a new group of them.

The old group's shared memory decides, for it outlives any rank:

- A roll call, in rounds. A rank calls out, then waits until each other rank has called out too, or its process has
  ended (the kernel drops its lock on the segment). Both are final and seen alike by all, so all know the same ranks.
- The first of them serves a new TCPStore and tells its port with its call. Then they make a group as always, and meet
  in a barrier, which all pass or none does.
- If a rank dies on the way, whoever notices goes on to the next round, and the rest follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from torch.distributed import DistError

from ..call import seconds_of
from ..creation import Members
from ..errors import CollectiveTimeoutError, CustomBackendError, TransportError
from ..threads import time
from .store import connect, serve

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ..transport.shm import ShmTransport
    from . import Build


_FIRST, _MOST = 0.2e-3, 5e-3  # s: between two looks at the roll


class _Over(Exception):
    """The rank that serves the round's store has given the round up."""


class Survivors:
    """One rank's part in finding out who is left, and in making a group of them."""

    # never set: here all ranks always end alike (see over_hosts.py, and c10d/shrink.py, which reads it)
    promised = None

    def __init__(self, old: Any, timeout: timedelta, build: Build) -> None:
        self.old, self._build = cast("ShmTransport", old.cpu_transport), build
        self.rank, self.name = old.rank(), old.getGroupName()
        self.began = time.monotonic()
        self.deadline = self.began + seconds_of(timeout)

    def agree(self) -> tuple[TCPStore, Any]:
        """(the new store, the new group)"""
        round = self._first_round()
        failed: Exception | None = None
        members: list[int] | None = None
        while True:
            before, members = members, self._call_the_roll(round)
            if failed is not None and members == before:
                raise failed  # on every rank: it was nobody's death
            try:
                return self._meet(round, members)
            except _Over:
                failed = None
            except (CustomBackendError, DistError) as error:
                failed = error
            round += 1

    def _first_round(self) -> int:
        """Of those this rank has not been in, the one that the others have reached."""
        round = 1
        while self.rank in self.old.roll(round)[0] or self.old.roll(round + 1)[0]:
            round += 1
        return round

    def _call_the_roll(self, round: int) -> list[int]:
        """The ranks that are left, in order."""
        self.old.enlist(round)
        present: dict[int, int] = {}
        awaited: list[int] = []

        def complete() -> bool:
            nonlocal present, awaited
            present, awaited = self.old.roll(round)
            return not awaited

        if not self._until(complete):
            raise CollectiveTimeoutError(
                f"shrink_group of group {self.name}, rank {self.rank}: {self.old.who(awaited[0])} neither came nor "
                f"ended in {time.monotonic() - self.began:.1f} s{self._more(awaited[1:])}. Do all ranks that are alive "
                "call shrink_group? One that hangs has to be ended."
            )
        return sorted(present)

    def _more(self, ranks: list[int]) -> str:
        return f" (nor did {', '.join(map(self.old.who, ranks))})" if ranks else ""

    def _meet(self, round: int, members: list[int]) -> tuple[TCPStore, Any]:
        left = max(self.deadline - time.monotonic(), 0.001)
        if self.rank == members[0]:
            store = serve(left)
            self.old.enlist(round, store.port)
        else:
            store = self._connect(round, members[0])
            store.set_timeout(timedelta(seconds=left))
        place = members.index(self.rank)
        return store, self._build(store, place, len(members), left, Members(self.old, members))

    def _connect(self, round: int, server: int) -> TCPStore:
        store: Any = None

        def connected() -> bool:
            nonlocal store
            if server not in self.old.roll(round + 1)[1]:
                raise _Over  # it has gone on to the next round, or ended
            if port := self.old.roll(round)[0][server]:
                with contextlib.suppress(TransportError):
                    store = connect("127.0.0.1", port)
            return store is not None

        if not self._until(connected):
            raise CollectiveTimeoutError(
                f"shrink_group of group {self.name}, rank {self.rank}: {self.old.who(server)} was to serve the new "
                f"store, and did not in {time.monotonic() - self.began:.1f} s"
            )
        return store

    def _until(self, there: Callable[[], bool]) -> bool:
        pause = _FIRST
        while not there():
            if time.monotonic() >= self.deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _MOST)
        return True
