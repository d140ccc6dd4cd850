"""Which of torchrun's starts of the ranks this is, said alike by all of them.

torchrun starts all ranks again after a failure, and may keep one store over all attempts: what the ranks of an earlier
one said is still there. Neither of two counts tells attempts apart: each host's agent leaves out restarts that another
host has caused, and a rank that failed before it came here has left nothing to count.

So rank 0 of the default group announces a new name, under which all of its ranks meet. Another rank takes the name that
it finds and, as long as it waits for rank 0, looks whether there is a newer one. What rank 0 decided, or somebody gave
up, before this rank came is an earlier attempt's: all ranks of an attempt start after all of the one before have ended.

Groups over processes of several jobs meet in the same way, whoever started those: one job may have been started again,
and the other not. There, ranks of an earlier attempt may wait beside those of a newer one: they go over to it.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

from ..errors import TransportError
from ..threads import time

if TYPE_CHECKING:
    from .bounded_store import BoundedStore

KEY = "attempt"
_PAUSE = 5e-3  # s


class SupersededError(Exception):
    """A newer attempt has been announced than the one whose ranks this one waits for."""


class Attempt:
    """``what``: is being done, for errors."""

    def __init__(self, store: BoundedStore, rank: int, what: str) -> None:
        self._store, self._rank, self._what = store, rank, what
        self._settled = False
        self.name = ""

    @staticmethod
    def possible() -> bool:
        """Whether a launcher may start the ranks again over the same store."""
        return "TORCHELASTIC_RESTART_COUNT" in os.environ

    def join(self) -> str:
        """The name: rank 0's own, or the first that differs from that of the attempt joined before."""
        if self._rank == 0:
            self.name = uuid.uuid4().hex
            self._store.set(KEY, self.name)
            return self.name
        before, started = self.name, time.monotonic()
        while not (self._store.check([KEY]) and (found := self._announced()) != before):
            if time.monotonic() >= self._store.deadline - _PAUSE:
                raise TransportError(
                    f"{self._what}: heard nothing from rank 0 for {time.monotonic() - started:.1f} s"
                    f"{' but what an earlier attempt of the job has left' if before else ''}; did it start, and does "
                    "it call init_process_group (or what makes this group)? Not there yet: rank 0."
                )
            time.sleep(_PAUSE)
        self.name = found
        return found

    def look(self) -> None:
        """Raises SupersededError, until the attempt is settled."""
        if self._settled or self._announced() == self.name:
            return
        if self._rank == 0:
            raise TransportError(
                f"{self._what}: the job's ranks have been started again, and this process is of an earlier attempt (or "
                "two processes were given rank 0)"
            )
        raise SupersededError

    def settle(self) -> None:
        """All of its ranks have met."""
        self._settled = True

    def _announced(self) -> str:
        return self._store.get(KEY).decode()
