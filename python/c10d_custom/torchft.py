"""Groups of this backend for torchft, whose Manager takes an object and no name: ``Manager(pg=ProcessGroupCustom())``.

Its users import it: it imports torchft, which this package doesn't need."""

from __future__ import annotations

from typing import Any

from torchft.process_group import ProcessGroupWrapper

from .c10d.issuing import NewGroup
from .c10d.process_group import build


class ProcessGroupCustom(ProcessGroupWrapper):
    """A group that torchft makes anew for each quorum. ``timeout``, of the constructor: for making one, and for each
    call. What a call fails with names the rank that is lost, dead or late (docs/errors.md); torchft's Manager takes it
    for an error of the step, which is then not committed."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        # store is that of the ranks with this number in all replica groups, under a prefix of the quorum's own.
        # The ranks are of several jobs, each of which may have a default group of its own.
        return build(
            NewGroup(store, rank, world_size, self._timeout, f"torchft quorum {self._quorum_id}", strangers=True)
        )

    def getBackendName(self) -> str:
        return "torchft-custom"

    def abort(self, errored: bool = True) -> None:
        group = self._pg
        super().abort(errored)  # ends the calls that run, and forgets the group
        if group is not None:
            group.shutdown()

    def shutdown(self) -> None:
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()
