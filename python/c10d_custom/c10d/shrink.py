"""Going on without the dead: the ranks of the default group that are left make themselves a new default group.

torch's own shrink_group cannot do it: it wraps what a backend returns into a C++ ProcessGroup, and takes C++ backends
only. It also wants to be told who is gone, and to be told the same on every rank; and it keeps a store that may have
died with rank 0. Here the old group's shared memory decides, for it outlives any rank:

- A roll call, in rounds. A rank calls out, then waits until each other rank has called out too, or its process has
  ended (the kernel drops its lock on the segment). Both are final and seen alike by all, so all know the same ranks.
- The first of them serves a new TCPStore and tells its port with its call. Then they make a group as always, and meet
  in a barrier, which all pass or none does.
- If a rank dies on the way, whoever notices goes on to the next round, and the rest follow.

The old groups are destroyed when the new one is there: a rank for which this raises still has them, and may try again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from torch.distributed import (
    DistError,
    PrefixStore,
    TCPStore,
    destroy_process_group,
    get_backend_config,
    group,
    init_process_group,
)

from ..creation.processes import Members
from ..errors import CollectiveTimeoutError, CustomBackendError, UsageError
from ..transport.shm.transport import ShmTransport
from . import issuing, process_group, registration

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_FIRST, _MOST = 0.2e-3, 5e-3  # s: between two looks at the roll
_CONNECT = timedelta(seconds=2)


class _Over(Exception):
    """The rank that serves the round's store has given the round up."""


def shrink_group(timeout: timedelta | None = None) -> ProcessGroup:
    """Makes the ranks of the default group whose processes are alive the new default group, which it returns: ranks are
    renumbered in their old order. Every one of them calls it, after an error or not; what is under way on any group of
    this process fails, and all its groups are destroyed. ``timeout``: a timedelta, how long to wait for the other
    ranks; the group's own if None.

    Raises CollectiveTimeoutError if a rank neither comes nor ends, UsageError for ranks on several hosts; the old
    groups are then still there."""
    old = group.WORLD
    if not isinstance(old, process_group.CustomProcessGroup):
        raise UsageError('shrink_group: the default group is not there, or not one of the backend "custom"')
    if not isinstance(old.cpu_transport, ShmTransport):
        raise UsageError(
            "shrink_group: the default group spans several hosts, and only one of a single host can be shrunk: "
            "restart the job from a checkpoint"
        )
    backend, own = get_backend_config(old), old.timeout
    for each in issuing.live():
        each.abort()
    store, new = _Survivors(old, own if timeout is None else timeout).agree()
    new.set_timeout(own)
    store.set_timeout(own)
    destroy_process_group()
    for each in issuing.live():
        if each is not new:
            each.shutdown()
    with registration.ready_made(new):
        init_process_group(backend, store=store, rank=new.rank(), world_size=new.size(), timeout=own)
    return cast("ProcessGroup", group.WORLD)


class _Survivors:
    """One rank's part in it."""

    def __init__(self, old: process_group.CustomProcessGroup, timeout: timedelta) -> None:
        self.old = cast(ShmTransport, old.cpu_transport)
        self.rank, self.name = old.rank(), old.getGroupName()
        self.timeout, self.began = timeout, time.monotonic()
        self.deadline = self.began + timeout.total_seconds()

    def agree(self) -> tuple[TCPStore, process_group.CustomProcessGroup]:
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
                "ended in "
                f"{time.monotonic() - self.began:.1f} s{self._more(awaited[1:])}. Do all ranks that are alive call "
                "shrink_group? "
                "One that hangs has to be ended."
            )
        return sorted(present)

    def _more(self, ranks: list[int]) -> str:
        return f" (nor did {', '.join(map(self.old.who, ranks))})" if ranks else ""

    def _meet(self, round: int, members: list[int]) -> tuple[TCPStore, process_group.CustomProcessGroup]:
        left = timedelta(seconds=max(self.deadline - time.monotonic(), 0.001))
        if self.rank == members[0]:
            store = TCPStore("127.0.0.1", 0, None, True, left, wait_for_workers=False)
            self.old.enlist(round, store.port)
        else:
            store = self._connect(round, members[0])
            store.set_timeout(left)
        new = process_group.build(
            PrefixStore("shrunk", store),
            members.index(self.rank),
            len(members),
            left,
            self.name,
            processes=Members(self.old, members),
        )
        try:
            cast(Any, new.barrier()).wait()
        except BaseException:
            new.shutdown()
            raise
        return store, new

    def _connect(self, round: int, server: int) -> TCPStore:
        store: Any = None

        def connected() -> bool:
            nonlocal store
            if server not in self.old.roll(round + 1)[1]:
                raise _Over  # it has gone on to the next round, or ended
            if port := self.old.roll(round)[0][server]:
                try:
                    # TCPStore goes on trying where nobody listens any more.
                    socket.create_connection(("127.0.0.1", port), _CONNECT.total_seconds()).close()
                    store = TCPStore("127.0.0.1", port, None, False, _CONNECT, wait_for_workers=False)
                except (OSError, DistError):
                    pass
            return store is not None

        if not self._until(connected):
            raise CollectiveTimeoutError(
                f"shrink_group of group {self.name}, rank {self.rank}: {self.old.who(server)} was to "
                f"serve the new store, and did not in {time.monotonic() - self.began:.1f} s"
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
