"""Which ranks of a default group are left, and a new group of them, over hosts and inside one.

The lowest rank that is left presides; the others call it at its meeting point, and it tells them what to do:

- Each that comes says which ranks of its own host have ended, as its shared memory shows: nobody else need guess. Of a
  host from which nobody comes, all ranks count as ended if each one's port is refused *and* the failure detector has
  seen or been told that the first of them ended a connection to another host in good order, as the kernel of a living
  host does for a process that ends. A firewall that rejects does the first only; a host that is cut off, or has no
  power, does neither, and is waited for until the time-out. So of a group that a network has parted, no part takes
  another for dead.
- When every rank has come or ended, the president serves a new TCPStore; those that have come make a group and meet in
  a barrier. Who has done so promises to go on with it, and says so. When all have, the president says so to all, and
  they do. If one is lost before, or cannot, they begin again without it.
- If the president is lost, the next lowest presides. If then all that are left have promised the same, they go on with
  that group, for the lost president may have told some ranks to go on, who have done so. If one of them has not
  promised it, they begin again: a president tells nobody to go on before all have promised.
- Who has promised and hears no more does not know whether the others go on. It must neither stay behind nor go on
  alone, and so gives up all its groups (shrink.py)."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import DistError

from ..call import seconds_of
from ..creation import Processes
from ..errors import AbortedError, CollectiveTimeoutError, CustomBackendError, TransportError
from ..launch import communicators, launcher, mpi_job
from ..launch.door import STRANGERS, is_of_this_user
from ..threads import own, select, socket, time
from ..transport import SHRINKS
from ..transport.hosts.layout import Hosts
from ..transport.hosts.meeting_point import MeetingPoint
from ..transport.hosts.tcp_line import At, TcpLine
from .handle import connect, serve

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ..transport import LocalTransport
    from ..transport.shm import ShmTransport

    class Build(Protocol):
        """Makes a group, collectively over its ``size`` ranks, within ``seconds``; an error on all of them where one
        cannot take part, and then nothing of it is left. ``store``: the group's alone."""

        def __call__(self, store: Any, rank: int, size: int, seconds: float, processes: Processes) -> Any: ...


_FIRST, _MOST, _PART = 0.2e-3, 20e-3, 0.3  # s: between two looks; of the time that it has taken so far
_KINDS = {kind.__name__: kind for kind in (CollectiveTimeoutError, AbortedError)}  # of an error that all ranks raise
_MAKING = 60.0  # s: that making a group may take, at most: all its ranks are there and alive
RESTART = "restart the job from a checkpoint"


@dataclass
class Promise:
    """A group that this rank has made and goes on with if the president says so."""

    name: str  # of this making of it
    members: list[int]
    store: TCPStore
    new: Any


class LocalPoint(MeetingPoint):
    """Of a rank of a group inside one host, made when it calls shrink_group. The ranks' marks in shared memory say that
    they have come, and name their sockets, to which only processes of this user are let."""

    def __init__(self, local: ShmTransport) -> None:
        self.rank, self._local, self._secret = local.rank, local, b""
        mark = SHRINKS | secrets.randbits(31)
        self._server = own(socket.socket(socket.AF_UNIX))
        self._server.bind(_name(mark))
        self._server.listen()
        self._server.setblocking(False)
        local.set_mark(mark)

    def call(self, rank: int) -> TcpLine:
        link = own(socket.socket(socket.AF_UNIX))
        link.setblocking(False)
        states = self._local.states(0)
        came = not link.connect_ex(_name(states[rank].mark if states else 0)) and is_of_this_user(link)
        return TcpLine(link, self._secret, self.rank, rank, 0 if came else errno.EAGAIN)

    def admits(self, link: socket.socket) -> bool:
        return is_of_this_user(link)


def _name(mark: int) -> str:
    return f"\0c10d_custom-left-{mark:x}"


class Survivors:
    """One rank's part in it. ``promised``: its Promise, from giving it on, unless it has heard that nobody goes on with
    it."""

    promised: Promise | None = None
    failed: tuple[str, str] | None = None  # the error that it raises
    _connect: Callable[[str, int], TCPStore] = staticmethod(connect)

    def __init__(self, old: Any, timeout: timedelta, build: Build | None = None) -> None:
        self.old, self._build = old.cpu_transport, build
        self.rank, self.name = old.rank(), old.getGroupName()
        self.local, self.hosts, self.point = self._parts()
        self.seconds, self.began = seconds_of(timeout), time.monotonic()
        self.deadline = self.began + self.seconds
        self.missing: Mapping[int, At] = {}  # those that keep this rank waiting
        self.calls: dict[int, TcpLine] = {}  # to ranks that may preside, or of hosts from which nobody has come

    def _parts(self) -> tuple[LocalTransport, Hosts, MeetingPoint]:
        if hasattr(self.old, "meeting_point"):
            return self.old.local, self.old.hosts, self.old.meeting_point
        everyone = list(range(self.old.size))
        return self.old, Hosts(self.rank, [everyone], 0, self.rank, len(everyone)), LocalPoint(self.old)

    def agree(self) -> tuple[TCPStore, Any]:
        """(the new store, the new group)"""
        try:
            while True:
                line = self._president()
                made = _President(self).lead() if line is None else self._follow(line)
                if made is not None:
                    return made.store, made.new
                self._wait(())  # the president is lost: its host's ranks are about to see it
        finally:
            for line in self.calls.values():
                line.close()
            if not self.hosts.others:
                self.point.close()

    # --- who is left

    def ended_here(self) -> set[int]:
        """The ranks of this host whose processes have ended, or have left the group."""
        states = self.local.states(0) or []
        return {self.hosts.here[index] for index, state in enumerate(states) if not state.alive}

    def known_to_have_ended(self) -> set[int]:
        """The ranks of any host whose end a failure detector has seen or was told of: the old group's, and of a group
        that this rank has promised, that one's. The old one may have seen a reset where a rank died with news unread,
        which proves nothing; on the new one's connections there was no news. A group inside a host has no detector."""
        of: list[tuple[Any, Any]] = [(self.old, range(self.old.size))]
        if self.promised is not None:
            of.append((self.promised.new.cpu_transport, self.promised.members))
        seen = [(each.detector, members) for each, members in of if hasattr(each, "detector")]
        return {members[rank] for detector, members in seen for rank in detector.ended | detector.left}

    def _president(self) -> TcpLine | None:
        """A line to it; None: it is this rank, for the lower ones have ended, or their hosts refuse."""
        for rank in range(self.rank):
            while rank not in self.ended_here() and (at := self.called(rank)) is not At.REFUSED:
                if at is At.OPEN:
                    return self.calls[rank]
                self.missing = {rank: at}
                self._wait([self.calls[rank]])
        return None

    def called(self, rank: int) -> At:
        """What a call of that rank has come to. It is called until it is there, or its host refuses."""
        line = self.calls.get(rank)
        if line is None or line.over() and line.at is not At.REFUSED:
            if line is not None:
                line.close()
            line = self.calls[rank] = self.point.call(rank)
        line.hear()
        return line.at

    def _wait(self, what: Iterable[TcpLine]) -> None:
        """For news from there, not for long. CollectiveTimeoutError when it is late."""
        now = time.monotonic()
        if now >= self.deadline:
            raise self.late()
        wait(what, min(max(_PART * (now - self.began), _FIRST), _MOST))

    # --- following

    def here(self) -> dict[str, Any]:
        """What this rank says of itself and its host."""
        promised = self.promised.name if self.promised else None
        return {"here": sorted(self.ended_here()), "ended": sorted(self.known_to_have_ended()), "promised": promised}

    def _follow(self, line: TcpLine) -> Promise | None:
        """The promise that is to be kept; None: the president is lost."""
        said: dict[str, Any] = {}
        while not line.over():
            if (now := self.here()) != said:
                line.say(said := now)
            self._wait([line])
            for message in line.hear():
                if (made := self._do(message, line)) is not None:
                    return made
        return None

    def _do(self, message: dict[str, Any], line: TcpLine) -> Promise | None:
        what = message.get("do")
        if what == "missing":
            self.missing = {rank: At[at] for rank, at in message["for"]}
        elif what == "again":
            self.break_promise()
        elif what == "make":
            self.break_promise()
            name, members = str(message["name"]), [int(rank) for rank in message["members"]]

            def look() -> str | None:
                return "the rank that presides has called it off" if wait([line], 0.0) else None

            try:
                store = self._connect(line.address(), int(message["port"]))
                self.promised = self.make(name, members, store, look)
                line.say({"made": name})
            except (CustomBackendError, DistError) as error:
                line.say({"failed": name, "error": str(error)})
        elif what == "keep" and self.promised is not None and message["name"] == self.promised.name:
            return self.promised
        elif what == "fail":
            if message["none"]:  # else an earlier president may have told others to go on
                self.break_promise()
            # Who presides had called long before this rank did, and its time was over: it may call again.
            timed_out = message["kind"] == CollectiveTimeoutError.__name__
            if not (timed_out and self.deadline - time.monotonic() > self.seconds / 2):
                raise self.failure(str(message["kind"]), str(message["error"]))
        return None

    # --- making a group

    def make(self, name: str, members: list[int], store: TCPStore, look: Callable[[], str | None]) -> Promise:
        """Collective over the members. ``look``: called now and then, says why it is in vain."""
        left = max(min(self.deadline - time.monotonic(), _MAKING), 0.001)
        store.set_timeout(timedelta(seconds=left))
        if len({self.hosts.of_rank(rank)[0] for rank in members}) > 1:
            communicators.leave_out_the_lost(mpi_job.job(), left, lambda: _require(look))
        assert self._build is not None
        new = self._build(store, members.index(self.rank), len(members), left, Processes(left_for=look))
        return Promise(name, members, store, new)

    def break_promise(self) -> None:
        """The president has said that nobody goes on with it."""
        if self.promised is not None:
            promised, self.promised = self.promised, None
            promised.new.shutdown()

    # --- errors

    def failure(self, kind: str, text: str) -> CustomBackendError:
        self.failed = kind, text
        return _KINDS.get(kind, TransportError)(f"shrink_group of group {self.name}, rank {self.rank}: {text}")

    def late(self) -> CustomBackendError:
        return self.failure(CollectiveTimeoutError.__name__, self._text_of_missing())

    def _text_of_missing(self) -> str:
        seconds = f"{time.monotonic() - self.began:.1f} s"
        if not self.missing:
            return f"the ranks that are left had not made a group in {seconds}"
        (first, at), *more = ((self.old.who(rank), at.value) for rank, at in sorted(self.missing.items()))
        also = f" (nor did {', '.join(f'{who}: {at}' for who, at in more)})" if more else ""
        ended, hint = "ended", ""
        if self.hosts.others:
            ended, hint = "is known to have ended", f"; without a host that does not answer, {RESTART}"
        return (
            f"{first} neither came nor {ended} in {seconds}: {at}{also}. Do all ranks that are alive call "
            f"shrink_group? One that hangs has to be ended{hint}."
        )


def _require(look: Callable[[], str | None]) -> None:
    if (why := look()) is not None:
        raise TransportError(why)


def wait(what: Iterable[TcpLine], seconds: float, point: MeetingPoint | None = None) -> bool:
    """Whether one of those has something to say, or somebody calls there, within that time."""
    poll = select.poll()
    for each in [line for line in what if not line.over()] + ([point] if point else []):
        poll.register(each.fileno(), select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1e3))


_LAUNCHER_ENDS = 1.0  # s: within which a launcher ends the other ranks of a host that has lost one
_SOONER, _SOONER_MOST = 0.1, 1.0  # a president gives up sooner than the others, who hear from it who is missing
_SETTLE, _SETTLE_HERE = 0.2, 5e-3  # s: for the news of a loss, once a making has failed; inside a host


class _President:
    """What the lowest of the ranks that are left does: it hears who has come and who has ended, has them make a group,
    and says what comes of it."""

    def __init__(self, own: Survivors) -> None:
        self.own = own
        self._callers: list[TcpLine] = []  # the oldest first
        # Whether this rank has heard the promises of all that are left, and nobody has been told to keep one. Only then
        # can it call all of them off.
        self._knows = False
        self._by = own.deadline - min(_SOONER_MOST, _SOONER * own.seconds)
        # Inside one host, a launcher that ends the other ranks ends this one, too.
        ends = launcher.watches() and own.hosts.others
        self._settled_at = own.began + (min(_LAUNCHER_ENDS, own.seconds / 2) if ends else 0.0)

    def lead(self) -> Promise:
        before, reason = list[int](), None  # who has failed to make a group; why
        try:
            while True:
                members, promised = self._gather(), self.own.promised
                self._knows = True
                if promised is not None and all(said["promised"] == promised.name for said in self._said().values()):
                    return self._keep(promised)
                self.own.break_promise()
                if members == before:  # it was nobody's death
                    text = f"the ranks that are left made no group: {reason}; {RESTART}"
                    raise self.own.failure(TransportError.__name__, text)
                before, reason = members, self._make(members)
                if self.own.promised is not None and reason is None:
                    return self._keep(self.own.promised)
                self._tell({"do": "again"})
                self.own.break_promise()
                time.sleep(_SETTLE if self.own.hosts.others else _SETTLE_HERE)
                self._hear(0.0)
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            for line in self._callers:
                line.close()

    # --- who has come, who has ended

    def _gather(self) -> list[int]:
        """The ranks that are left, all of which have come."""
        while (missing := self._missing()) or self._more_may_end():
            if missing != self.own.missing:
                self._tell({"do": "missing", "for": [(rank, at.name) for rank, at in missing.items()]})
            self._require_time(missing)
            self._hear(_MOST)
        self.own.missing = {}
        return sorted([self.own.rank, *self._said()])

    def _said(self) -> dict[int, dict[str, Any]]:
        """By the ranks that have come, of themselves and their hosts."""
        return {rank: line.said for rank, line in self._lines.items() if line.said}

    def _missing(self) -> dict[int, At]:
        """What is known of the ranks that have neither come nor ended."""
        own, said = self.own, self._said()
        evidence = own.known_to_have_ended().union(*(each["ended"] for each in said.values()))
        missing: dict[int, At] = {}
        for ranks in own.hosts.ranks:
            present = [rank for rank in ranks if rank in said]
            if present or ranks is own.hosts.here:
                ended = own.ended_here().union(*(said[rank]["here"] for rank in present))
                awaited = {rank: At.CALLED for rank in ranks if rank not in ended}
            else:
                awaited = {rank: own.called(rank) for rank in ranks}
                if ranks[0] in evidence and set(awaited.values()) == {At.REFUSED}:
                    awaited = {}
            missing.update({r: at for r, at in awaited.items() if r != own.rank and r not in said})
        return missing

    def _more_may_end(self) -> bool:
        """Whether a launcher may be ending ranks that have come, of a host that has lost one. A rank that died while
        MPI makes a communicator would take others with it: MPICH crashes in a send to a process that is gone."""
        if time.monotonic() >= self._settled_at:
            return False
        come = {self.own.rank, *self._said()}
        return any(0 < len(come.intersection(ranks)) < len(ranks) for ranks in self.own.hosts.ranks)

    @property
    def _lines(self) -> dict[int, TcpLine]:
        """To the ranks that have called; of one that has called shrink_group again, the newest."""
        return {line.peer: line for line in self._callers if line.at is At.OPEN and line.peer is not None}

    def _hear(self, seconds: float) -> None:
        """All that has been said, once something is or so long has passed."""
        own, most = self.own, 2 * self.own.old.size + STRANGERS
        wait((*self._callers, *own.calls.values()), seconds, own.point)
        self._callers += own.point.answer()
        for line in (*self._callers, *own.calls.values()):
            line.hear()
        for line in list(self._callers):
            useless = len(self._callers) > most if line.at is At.CALLED else (line.peer or 0) < own.rank
            if useless or line.over():
                self._callers.remove(line)
                line.close()

    # --- making a group

    def _make(self, members: list[int]) -> str | None:
        """None: all have promised to go on with it; else why not."""
        name, who = f"{self.own.rank}.{secrets.token_hex(8)}", self.own.old.who
        lines = {rank: self._lines[rank] for rank in members if rank != self.own.rank}
        store = serve(self._by - time.monotonic())
        self._tell({"do": "make", "name": name, "members": members, "port": store.port})

        def look() -> str | None:
            """Why it is in vain."""
            self._hear(0.0)
            for rank, line in lines.items():
                if self._lines.get(rank) is not line:
                    return f"{who(rank)} was lost"
                if line.said.get("failed") == name:
                    return f"{who(rank)}: {line.said['error']}"
            return None

        try:
            self.own.promised = self.own.make(name, members, store, look)
        except (CustomBackendError, DistError) as error:
            return look() or str(error)
        while (why := look()) is None and (
            silent := {rank: At.CALLED for rank, line in lines.items() if line.said.get("made") != name}
        ):
            self._require_time(silent)
            self._hear(_MOST)
        return why

    # --- what comes of it

    def _keep(self, promised: Promise) -> Promise:
        self._knows = False  # from now on, somebody may go on with it
        self._tell({"do": "keep", "name": promised.name})
        return promised

    def _require_time(self, missing: Mapping[int, At]) -> None:
        self.own.missing = missing
        if time.monotonic() >= self._by:
            raise self.own.late()

    def give_up(self, error: BaseException) -> None:
        """Tells the others that this rank presides no longer, without waiting for them."""
        if self._knows:
            self.own.break_promise()
        gave_up = f"{self.own.old.who(self.own.rank)}, which presided, gave up: {type(error).__name__}: {error}"
        kind, text = self.own.failed or (AbortedError.__name__, gave_up)
        self._tell({"do": "fail", "kind": kind, "error": text, "none": self._knows})

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._lines.values():
            line.say(message)
