"""What becomes of a process's groups over hosts where it calls MPI_Finalize itself, and in a child that it forks."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, cast

from ..errors import UsageError
from ..launch import mpi_job
from ..transport.hosts.transport import HierarchicalTransport
from ..transport.tickets import PyTicket
from .issuing import Issuing, live
from .no_transport import NoTransport

if TYPE_CHECKING:
    from ..transport.by_device import ByDevice

_ITS_PARENTS = "is its parent's, which a forked child cannot use: create one in the child"
_parents: list[object] = []  # what a forked child has of its parent's groups; nobody may touch or free it


@functools.cache
def watch_the_process() -> None:
    """From now on; once."""
    mpi_job.at_finalize(_end_all)
    os.register_at_fork(after_in_child=_disown_all)


def _over_hosts() -> list[tuple[Issuing, HierarchicalTransport]]:
    pairs = [(group, group.cpu_transport) for group in live()]
    return [(group, transport) for group, transport in pairs if isinstance(transport, HierarchicalTransport)]


def _end_all() -> None:
    # Any call of MPI's after MPI_Finalize would end the process without a word.
    for group, transport in _over_hosts():
        transport.mpi_finalized = True
        group.shutdown()


def _disown_all() -> None:
    # The child would act in its parent's name, in the memory that ranks share and by MPI. (Inside one host, the core
    # knows by itself that it is called in a forked child.)
    for group, transport in _over_hosts():
        refused = UsageError(f"group {group._name}, rank {group._group_rank}: it {_ITS_PARENTS}")
        failed = PyTicket(lambda token: None)
        failed.finish(refused)
        _parents.append((group._transport, group._completer.disown(failed)))
        transport.disowned = refused
        nobodys = NoTransport(
            group._name, group._group_rank, group._group_size, group._transport.device_types, _ITS_PARENTS
        )
        group._transport = cast("ByDevice", nobodys)
