"""Going on without the dead: the ranks of the default group that are left make themselves a new default group.

torch's own shrink_group cannot do it: it wraps what a backend returns into a C++ ProcessGroup, and takes C++ backends
only. It also wants to be told who is gone, and to be told the same on every rank; and it keeps a store that may have
died with rank 0. Here the ranks find that out by themselves: inside a host by its shared memory, between hosts
by connections of their own (recovery/).

The old groups are destroyed when the new one is there: a rank for which this raises still has them, and may try again.
The one exception says so."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from torch.distributed import PrefixStore, destroy_process_group, get_backend_config, group, init_process_group

from ..errors import AbortedError, CustomBackendError, UsageError
from ..launch import mpi_job
from ..recovery.survivors import Survivors
from ..transport.hosts.transport import HierarchicalTransport
from . import issuing, process_group, registration

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..creation import Processes


def shrink_group(timeout: timedelta | None = None) -> ProcessGroup:
    """Makes the ranks of the default group whose processes are alive the new default group, which it returns: ranks are
    renumbered in their old order. Every one of them calls it, after an error or not; what is under way on any group of
    this process fails, and all its groups are destroyed. ``timeout``: a timedelta, how long to wait for the other
    ranks; the group's own if None.

    Raises CollectiveTimeoutError if a rank neither comes nor ends, or is not known to have ended, and what making a
    group raises; the old groups are then still there. AbortedError where it was left unknown whether the others have
    gone on with this rank: it has no groups then, and the others will find it gone."""
    old = group.WORLD
    if not isinstance(old, process_group.CustomProcessGroup) or old._closed:
        raise UsageError('shrink_group: the default group is not there, or not one of the backend "custom"')
    backend, own = get_backend_config(old), old.timeout
    transport = old.cpu_transport
    if isinstance(transport, HierarchicalTransport):
        transport.tell_that_it_shrinks()
    for each in issuing.live():
        each.abort()
    wait = own if timeout is None else timeout

    def build(store: Any, rank: int, size: int, seconds: float, processes: Processes) -> Any:
        shrunk, left = PrefixStore("shrunk", store), timedelta(seconds=seconds)
        return process_group.build_and_meet(
            issuing.NewGroup(shrunk, rank, size, left, old.getGroupName(), processes=processes)
        )

    survivors = Survivors(old, wait, build)
    try:
        store, new = survivors.agree()
        new.set_timeout(own)
        store.set_timeout(own)
        new.endpoint, old.endpoint = old.endpoint, None  # the handle stays this process's
        _destroy_all(but=new)
        if new.size() < old.size():
            mpi_job.abandon()
        if isinstance(new.cpu_transport, HierarchicalTransport):
            mpi_job.go_on(new.size())
        with registration.ready_made(new):
            init_process_group(backend, store=store, rank=new.rank(), world_size=new.size(), timeout=own)
    except BaseException as error:
        if survivors.promised is None:
            raise
        _destroy_all()
        if isinstance(error, CustomBackendError):
            raise AbortedError(
                f"{error} This rank had agreed to go on, and did not hear whether the others do: its groups are "
                "destroyed, and the others will find it gone. End it, or restart the job from a checkpoint."
            ) from error
        raise
    return cast("ProcessGroup", group.WORLD)


def _destroy_all(but: process_group.CustomProcessGroup | None = None) -> None:
    if group.WORLD is not None:
        destroy_process_group()
    for each in issuing.live():
        if each is not but:
            each.shutdown()
