"""How the ranks of a group meet: they tell each other through a store who and where they are, and get a transport."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from ..call import seconds_of
from ..config import Config, restart_attempt, traced
from ..creation import Gathering, Processes
from ..creation.bounded_store import Attempt, BoundedStore, SupersededError
from ..creation.exchange import Exchange, Membership, digest_of, elsewhere, life
from ..creation.local_datagrams import Letters, Neighbours, letters_of, mailbox
from ..creation.topology import FIRST_TOPIC, by_host, locations
from ..errors import CustomBackendError, TransportError, UsageError
from ..threads import time
from ..transport import rank_name
from ..transport.by_device import ByDevice
from ..transport.shm import ShmTransport
from .issuing import Issuing, NewGroup, close_groups_first, close_groups_last
from .read_ahead import read_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import ProcessGroup, Store

    from ..creation.topology import Location
    from ..recovery.regroup import Roster
    from ..transport import Transport

    _Met = tuple[ByDevice, Store]

_known: dict[int, str] = {}  # this process (forks have others) -> the attempt in which the default group's ranks met


@functools.cache
def configuration() -> Config:
    return Config.from_env()


def meet(new: NewGroup) -> tuple[ByDevice, Store]:
    """(transport, store) of a new group: the store is the group's own part of the one given. Collective over the
    group's ranks; TransportError on all of them if any cannot take part. UsageError: there is no such rank."""
    rank, size = new.rank, new.size
    what = f"creation of group {new.name or '(unnamed)'}, rank {rank}"
    if not 0 <= rank < size:
        raise UsageError(
            f"{what}: there is no such rank in a group of {size}, whose ranks are 0 to {size - 1}. Are RANK and "
            "WORLD_SIZE (the arguments rank and world_size, or what the launcher was told of its hosts) of one job?"
        )
    ours = bool(new.members) and new.processes is None  # all in the default group, if it is of this backend
    world = _neighbourly_world() if ours else None
    with BoundedStore(PrefixStore("custom", new.store), time.monotonic() + seconds_of(new.timeout), what) as bounded:
        meeting = _Meeting(bounded, new)
        members = meeting.members
        prefix = _known.get(os.getpid()) or f"{restart_attempt()}"
        try:
            if world is not None:
                transport, own = meeting.among(world, prefix)
            elif new.roster is not None:
                transport, own = meeting.of(new.roster)
            elif new.strangers:
                # Not under this job's own attempt: the others' may be another. Rank 0's is everyone's.
                transport, own = meeting.in_newest(Attempt(bounded.under(digest_of(members)), rank, what))
            elif new.processes is not None or dist.group.WORLD is not None or not Attempt.possible():
                transport, own = meeting.under(prefix)
            else:
                attempt = Attempt(bounded.under(digest_of(members)), rank, what)
                transport, own = meeting.in_newest(attempt)
                _known[os.getpid()] = attempt.name
        except TransportError as error:
            if words := elsewhere(new.store, bounded, rank, size):
                raise TransportError(f"{error}{words}") from error
            raise
        except CustomBackendError:
            raise
        except dist.DistError as error:
            raise bounded.broke(error) from error
    transport.strangers = new.strangers
    close_groups_last()
    read_ahead()
    if traced(configuration()):
        from . import trace_dump

        trace_dump.follow(transport, configuration())
    return transport, own


class _Meeting:
    """One rank's way to a new group."""

    def __init__(self, store: BoundedStore, new: NewGroup) -> None:
        self.store, self.rank, self.name = store, new.rank, new.name
        self.devices, self.strangers = new.devices, new.strangers
        self.seconds, self.members = seconds_of(new.timeout), new.members or list(range(new.size))
        self.roster, self.processes = new.roster, new.processes
        if self.roster is not None:
            self.processes = self.roster.processes()
        elif self.processes is None and new.members:
            self.processes = _members_of_world(new.members)
        self.is_default = not new.members and not new.strangers  # others can be made from it without the store

    def in_newest(self, attempt: Attempt) -> _Met:
        while True:
            with contextlib.suppress(SupersededError):
                return self.under(attempt.join(), attempt)

    def among(self, world: ShmTransport, prefix: str) -> _Met:
        """Of ranks that know each other: all are in the default group, on one host. The store is asked only by who
        waits for long."""
        part, neighbours = self.store.under(prefix), cast("Neighbours", world.neighbours)
        with Membership(part, self.rank, self.members, self.name) as membership:
            group = f"{self.name} {membership.digest}"
            own = part.under(membership.digest).under(f"{neighbours.life(group)}")
            processes = _of_world(world, self.members)
            letters = Letters(
                neighbours, self.members, self.rank, group, self.seconds, processes, membership.look, membership.waiting
            )
            cpu = self._by_letters(letters)
            return ByDevice(cpu, configuration(), one_host=True, devices=self.devices), own.plain

    def of(self, roster: Roster) -> _Met:
        """Of ranks that were named by their handles. Those of one host have mailboxes already."""
        if (neighbours := roster.neighbours) is None:
            return self.under(roster.digest)
        neighbours.mailbox.sweep()
        processes = self.processes or Processes()
        cpu = self._by_letters(
            Letters(
                neighbours, range(roster.size), self.rank, "", self.seconds, processes, roster.look, roster.waiting
            ),
            neighbours,
        )
        return ByDevice(cpu, configuration(), one_host=True, devices=self.devices), self.store.plain

    @contextlib.contextmanager
    def _giving_up(self, gathering: Gathering) -> Iterator[None]:
        """An exception tells the others that this rank does not come."""
        try:
            yield
        except SupersededError:
            raise  # others that have joined the earlier attempt find that out by themselves
        except BaseException as error:
            gathering.give_up(error)
            raise
        finally:
            gathering.processes.close()
            if self.roster is not None:
                self.roster.ruled_out = gathering.ruled_out

    def under(self, prefix: str, attempt: Attempt | None = None) -> _Met:
        """Under keys that begin so; ``attempt``: the one whose name ``prefix`` is, if it is one's. Raises
        SupersededError, too, if there is one."""
        part, size = self.store.under(prefix), len(self.members)
        with Membership(part, self.rank, self.members, self.name) as membership:
            own, look = part.under(membership.digest), membership.look
            if attempt is None:
                # A store may see the same group name again after destroy_process_group.
                own = own.under(f"{life(own, self.rank)}")
            else:
                # The long wait looks only for a newer attempt, and compares no members: what the store has under those
                # keys may be an earlier attempt's, whose members may have differed.
                look = attempt.look
            if self.roster is not None:
                look = self.roster.look
            exchange = Exchange(own, self.rank, size, self.seconds, self.processes, look)
            with self._giving_up(exchange):
                if attempt is not None and self.rank and exchange.is_over(FIRST_TOPIC):
                    raise SupersededError
                _install_signal(configuration())
                transport = self._transport(exchange, attempt, membership)
                exchange.complete()
                return transport, own.plain

    def _transport(self, exchange: Exchange, attempt: Attempt | None, membership: Membership) -> ByDevice:
        box = mailbox() if self.is_default or self.strangers else None
        try:
            if box is not None and self.rank:
                exchange.sleep = box.fetch  # rank 0's first letter follows its verdict
            everywhere, by_letters = locations(exchange, box.name if box else "")
            exchange.sleep = time.sleep
            if attempt is not None:
                attempt.settle()
            one_host = len(by_host(everywhere)) == 1
            cpu: Transport
            if box is not None and by_letters:
                neighbours = Neighbours(
                    box, [place.mailbox for place in everywhere], {place.pid: place.started for place in everywhere}
                )
                ranks, left, processes = range(len(self.members)), exchange.left(), exchange.processes
                look, waiting = membership.look, membership.waiting
                letters = Letters(neighbours, ranks, self.rank, "", left, processes, look, waiting)
                cpu = self._by_letters(letters, neighbours)
                exchange.all_heard()
                box = None
            elif one_host:
                with letters_of(exchange) as letters:
                    cpu = self._by_letters(letters)
            else:
                cpu = self._over_hosts(exchange, everywhere)
            return ByDevice(cpu, configuration(), one_host=one_host, devices=self.devices)
        finally:
            if box is not None:
                box.close()

    def _over_hosts(self, exchange: Exchange, everywhere: Sequence[Location]) -> Transport:
        from ..creation import mpi_start  # what most groups do not need, and takes its time
        from ..launch import mpi_job
        from ..transport.hosts.transport import HierarchicalTransport, HostsGroup
        from ..transport.hosts.watched import Watched
        from .over_hosts import watch_the_process

        close_groups_first()  # before MPI ends
        with Watched(exchange, everywhere) as watched:
            strangers = self.strangers or self.roster is not None
            mpi = mpi_start.mpi_job(exchange, everywhere, self.members, strangers, watched.open)
            watch_the_process()
            group = HostsGroup(
                exchange,
                configuration(),
                self.name,
                self.members,
                everywhere,
                open_local=ShmTransport,
                job=mpi,
                abandon=mpi_job.abandon,
                detector=watched.detector,
                meets=self.is_default,
            )
            return HierarchicalTransport(group)

    def _by_letters(self, letters: Letters, keeps: Neighbours | None = None) -> ShmTransport:
        with self._giving_up(letters):
            _install_signal(configuration())
            transport = ShmTransport(letters, configuration(), self.name, self.members)
            letters.complete()
        transport.neighbours = keeps
        return transport


def known_as(attempt: str) -> None:
    """The default group's ranks have met again, others than before perhaps, by that name."""
    _known[os.getpid()] = attempt


def _install_signal(config: Config) -> None:
    if config.trace_signal:
        from .trace_dump import install_signal

        install_signal(config)


def operations_of(group: ProcessGroup | Issuing | None) -> Issuing | None:
    """What carries out the operations of CPU tensors of one of torch's groups, if that is this package: an Issuing,
    else None."""
    if group is None or isinstance(group, Issuing):
        return group
    try:
        return getattr(group._get_backend(torch.device("cpu")), "operations", None)
    except RuntimeError:  # a group without a backend for the CPU
        return None


def _world() -> Transport | None:
    """The default group's transport of CPU tensors, if it is of this package."""
    world = operations_of(dist.group.WORLD)
    return world.cpu_transport if world is not None else None


def _neighbourly_world() -> ShmTransport | None:
    """The same, if its ranks can write each other letters."""
    world = _world()
    return world if isinstance(world, ShmTransport) and world.neighbours is not None else None


def _members_of_world(members: list[int]) -> Processes | None:
    """What the default group knows of these global ranks, if it can tell who of them is gone."""
    parent = _world()
    return _of_world(parent, members) if parent is not None else None


def _of_world(world: Transport, members: list[int]) -> Processes:
    def fates() -> dict[int, str]:
        gone = world.gone()
        return {rank: gone[r] for rank, r in enumerate(members) if r in gone} if gone else {}

    def left_for() -> str | None:
        ranks = world.shrinking()
        return f"{', '.join(f'rank {rank}' for rank in ranks)} called shrink_group" if ranks else None

    return Processes(functools.partial(rank_name, members), left_for, fates)
