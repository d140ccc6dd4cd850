"""How the ranks of a group meet: they tell each other through a store who and where they are, and get a transport."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from ..config import Config, restart_attempt
from ..creation.attempt import Attempt, SupersededError
from ..creation.bounded_store import BoundedStore
from ..creation.exchange import Exchange, life
from ..creation.membership import Membership, digest_of
from ..creation.mpi_start import mpi_job
from ..creation.processes import Members
from ..creation.topology import FIRST_TOPIC, by_host, locations, require_one_user
from ..launch.mpi_job import abandon
from ..transport.by_device import ByDevice
from ..transport.hosts.transport import HierarchicalTransport
from ..transport.shm.transport import ShmTransport
from . import trace_dump as trace
from .issuing import Issuing

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup, Store

    from ..creation.processes import Processes

    _Met = tuple[ByDevice, Store]

_known: dict[int, str] = {}  # this process (forks have others) -> the attempt in which the default group's ranks met


@functools.cache
def configuration() -> Config:
    return Config.from_env()


def meet(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    members: list[int] | None = None,
    processes: Processes | None = None,
    devices: list[str] | None = None,
) -> tuple[ByDevice, Store]:
    """(transport, store) of a new group: the store is the group's own part of the one given. Collective over the
    group's ranks; TransportError on all of them if any cannot take part. ``members``: their global ranks,
    none of the default group; ``processes``: a processes.Processes, if the caller knows more than the ranks will tell;
    ``devices``: the types of device whose tensors the group takes, None for all."""
    seconds, is_default, members = timeout.total_seconds(), not members, members or list(range(size))
    what = f"creation of group {name or '(unnamed)'}, rank {rank}"
    with BoundedStore(PrefixStore("custom", store), time.monotonic() + seconds, what) as bounded:
        known = processes or _members_of_world(members)
        meeting = _Meeting(bounded, rank, members, name, seconds, known, devices, is_default)
        if processes is not None or dist.group.WORLD is not None or not Attempt.possible():
            transport, own = meeting.under(_known.get(os.getpid()) or f"{restart_attempt()}")
        else:
            transport, own = meeting.in_newest(Attempt(bounded.under(digest_of(members)), rank, what))
    trace.follow(transport, configuration())
    return transport, own


class _Meeting:
    """One rank's, of one group."""

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        members: list[int],
        name: str,
        seconds: float,
        processes: Processes | None,
        devices: list[str] | None,
        is_default: bool,
    ) -> None:
        self.store, self.rank, self.members, self.name = store, rank, members, name
        self.seconds, self.processes, self.devices = seconds, processes, devices
        self.is_default = is_default

    def in_newest(self, attempt: Attempt) -> _Met:
        while True:
            try:
                found = self.under(attempt.join(), attempt)
            except SupersededError:
                continue
            _known[os.getpid()] = attempt.name
            return found

    def under(self, prefix: str, attempt: Attempt | None = None) -> _Met:
        """Under keys that begin so; ``attempt``: whose name that is. Raises SupersededError, too, if there is one."""
        part, size = self.store.under(prefix), len(self.members)
        with Membership(part, self.rank, self.members, self.name) as membership:
            own, look = part.under(membership.digest), membership.look
            if attempt is None:
                # A store may see the same group name again after destroy_process_group.
                own = own.under(f"{life(own, self.rank)}")
            else:
                # Not at the members: those of an earlier attempt may have been others.
                look = attempt.look
            exchange = Exchange(own, self.rank, size, self.seconds, self.processes, look)
            try:
                if attempt is not None and self.rank and exchange.is_over(FIRST_TOPIC):
                    raise SupersededError
                trace.install_signal(configuration())
                transport = _transport(exchange, self.name, self.members, self.devices, attempt, self.is_default)
                exchange.complete()
                return transport, own.plain
            except SupersededError:
                raise  # others that have joined the earlier attempt find that out by themselves
            except BaseException as error:
                exchange.give_up(error)
                raise
            finally:
                exchange.processes.close()


def operations_of(group: ProcessGroup | Issuing | None) -> Issuing | None:
    """What carries out the operations of CPU tensors of one of torch's groups, if that is this package: an Issuing,
    else None."""
    if group is None or isinstance(group, Issuing):
        return group
    try:
        return getattr(group._get_backend(torch.device("cpu")), "operations", None)
    except RuntimeError:  # a group without a backend for the CPU
        return None


def _members_of_world(members: list[int]) -> Members | None:
    """processes.Members for ``members``, global ranks, if the default group has a segment in which to look."""
    world = operations_of(dist.group.WORLD)
    parent = world.cpu_transport if members and world is not None else None
    return Members(parent, members, roll=True) if isinstance(parent, ShmTransport) else None


def _transport(
    exchange: Exchange,
    name: str,
    members: list[int],
    devices: list[str] | None,
    attempt: Attempt | None,
    is_default: bool,
) -> ByDevice:
    everywhere = locations(exchange)
    if attempt is not None:
        attempt.settle()
    require_one_user(everywhere)
    if len(by_host(everywhere)) == 1:
        return ByDevice(
            ShmTransport(exchange, configuration(), name, members), configuration(), one_host=True, devices=devices
        )
    mpi = mpi_job(exchange, everywhere, members)
    cpu = HierarchicalTransport(
        exchange, configuration(), name, members, everywhere, ShmTransport, mpi, abandon, meets=is_default
    )
    return ByDevice(cpu, configuration(), one_host=False, devices=devices)
