"""A group that is made, and made again, of processes which the program names (recovery/regroup.py), in the same object:
torch 2.15's `enable_reconfigure`, `dist._get_reconfigure_handle` and `dist._reconfigure`.

Between two such groups, and after a reconfigure that has failed, there is none: every call is refused, and another
reconfigure may follow. The group before fails on all of its ranks when the first of them calls this."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..call import seconds_of
from ..errors import CustomBackendError, TransportError, UsageError
from ..launch import mpi_job
from ..recovery.regroup import Roster, explained
from ..threads import time
from ..transport.hosts.transport import HierarchicalTransport
from . import meeting, torch_private
from .issuing import Issuing, NewGroup, forget, on_top_of_own_step
from .no_transport import NoTransport
from .work import DoneWork

if TYPE_CHECKING:
    from ..recovery.handle import Endpoint

_NEVER = (
    "has not been configured: call dist._reconfigure (ProcessGroup.reconfigure) with the handles of its ranks first"
)
_FAILED = "has no ranks, since a reconfigure has failed: call it again with a new uuid"


def not_yet(new: NewGroup) -> Any:
    """In place of the transport of a group that has no ranks so far."""
    return NoTransport(new.name, new.rank, new.size, new.devices, _NEVER)


def reconfigure(group: Any, options: Any) -> DoneWork:
    """Collective over the processes whose handles ``options`` has (ReconfigureOptions). Returns when the group is made;
    an error where it is not."""
    endpoint: Endpoint = group.endpoint
    if group._closed:
        raise UsageError(f"reconfigure: group {group._name} has been destroyed")
    roster = Roster(endpoint, options.uuid, options.handles)
    if group._transport.interrupted_here() or on_top_of_own_step():
        raise UsageError(
            "reconfigure: called by a signal handler that has interrupted a call of a group; call it later"
        )
    endpoint.used.append(roster.number)
    seconds = group._seconds if options.timeout is None else seconds_of(options.timeout)
    over_hosts = _over_hosts(group)
    _retire(group)
    try:
        _make(group, roster, time.monotonic() + seconds)
    except BaseException as error:
        endpoint.forget()
        _retire(group)
        if isinstance(error, CustomBackendError):
            raise explained(error, roster) from error
        if isinstance(error, dist.DistError):  # a store's
            raise explained(TransportError(str(error)), roster) from error
        raise
    if over_hosts - {(member.place.host, member.place.pid) for member in roster.members}:
        mpi_job.abandon()  # those that are no longer members may have ended
    if isinstance(group.cpu_transport, HierarchicalTransport):
        mpi_job.go_on(roster.size)
    return DoneWork([])


def _over_hosts(group: Any) -> set[tuple[str, int]]:
    """The processes of a group over hosts; of another, none."""
    transport = group.cpu_transport
    places = transport.locations if isinstance(transport, HierarchicalTransport) else ()
    return {(place.host, place.pid) for place in places}


def _retire(group: Any) -> None:
    """Ends what the group is made of; the object stays."""
    old = group._transport
    forget(id(old))
    old.leave()
    group._completer.close()
    old.close()
    group._completer.drop_all()
    nothing: Any = NoTransport(group._name, group._group_rank, group._group_size, old.device_types, _FAILED)
    group._transport = nothing


def _make(group: Any, roster: Roster, deadline: float) -> None:
    store = roster.store(deadline - time.monotonic())
    left, description, own = timedelta(seconds=max(deadline - time.monotonic(), 0.001)), group._desc, group._timeout
    store.set_timeout(left)
    devices = group._transport.device_types
    new = NewGroup(store, roster.rank, roster.size, left, group._name, devices=devices, roster=roster)
    transport, stored = meeting.meet(new)
    Issuing._set_up(group, transport, stored, new)
    group._desc = description
    # torch names later groups by a count of its own, which is another in a process that has come later.
    count = torch.tensor([torch_private.group_count()])
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.MAX, False
    group.allreduce([count], options)
    group.set_timeout(own)
    store.set_timeout(own)
    if dist.group.WORLD is group:
        torch_private.regrouped(group, store, int(count))
        meeting.known_as(roster.digest)
