"""Which ranks of a default group are left, and a new group of them: over hosts, and with less to do inside one
(on_one_host.py).

The lowest rank that is left presides; the others call it at its meeting point, and it tells them what to
do:

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
  that group, for the one that is lost may have said so to some, who have gone on; else they begin again, for then it
  cannot have.
- Who has promised and hears no more does not know whether the others go on. It must neither stay behind nor go on
  alone, and so gives up all its groups (shrink.py)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import DistError

from ..call import seconds_of
from ..creation import Processes
from ..errors import AbortedError, CollectiveTimeoutError, CustomBackendError, TransportError
from ..launch import communicators, launcher, mpi_job
from ..launch.door import STRANGERS
from ..threads import select, time
from ..transport.hosts.tcp_line import At
from ..transport.hosts.transport import HierarchicalTransport
from .store import connect, serve

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ..transport import LocalTransport
    from ..transport.hosts.layout import Hosts
    from ..transport.hosts.meeting_point import MeetingPoint
    from ..transport.hosts.tcp_line import TcpLine
    from . import Build


_SLICE = 20e-3  # s: between two looks at this host's ranks
_REDIAL_FIRST = 0.2e-3  # s: then longer each time
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


class SurvivorsOverHosts:
    """One rank's part in it. ``promised``: its Promise, from giving it on, unless it has heard that nobody goes on with
    it. Inside one host: on_one_host.py."""

    promised: Promise | None = None
    promises = True  # whether a group that one rank has made may be none for another
    redial, settle = 50e-3, 0.2  # s: to call again, at most; for the news of a loss, once a making has failed
    ended, hint = "is known to have ended", f"; without a host that does not answer, {RESTART}"  # of an error

    _connect: Callable[[str, int], TCPStore] = staticmethod(connect)

    def __init__(self, old: Any, timeout: timedelta, build: Build | None = None) -> None:
        self.old, self._build = old.cpu_transport, build
        self.rank, self.name = old.rank(), old.getGroupName()
        self.local, self.hosts, self.point = self._parts()
        self.seconds, self.began = seconds_of(timeout), time.monotonic()
        self.deadline = self.began + self.seconds
        self.missing: Mapping[int, At] = {}  # those that keep this rank waiting

    def _parts(self) -> tuple[LocalTransport, Hosts, MeetingPoint]:
        return self.old.local, self.old.hosts, self.old.meeting_point

    def agree(self) -> tuple[TCPStore, Any]:
        """(the new store, the new group)"""
        made: Promise | None
        while True:
            line = self._president()
            if line is None:
                made = _preside(self)
            else:
                try:
                    made = self._follow(line)
                finally:
                    line.close()
            if made is not None:
                return made.store, made.new
            if time.monotonic() >= self.deadline:
                raise self.late()
            time.sleep(self.redial)  # the president is lost: its host's ranks are about to see it

    # --- who is left

    def ended_here(self) -> set[int]:
        """The ranks of this host whose processes have ended, or have left the group."""
        states = self.local.states(0) or []
        return {self.hosts.here[index] for index, state in enumerate(states) if not state.alive}

    def known_to_have_ended(self) -> set[int]:
        """Of all hosts: those that a detector has seen, or was told of: the old group's; and that of the promised one,
        where no news can have been left unread, at which a kernel resets a connection."""
        ended = self.old.detector.ended | self.old.detector.left
        new = self.promised.new.cpu_transport if self.promised is not None else None
        if self.promised is not None and isinstance(new, HierarchicalTransport):
            ended |= {self.promised.members[rank] for rank in new.detector.ended | new.detector.left}
        return ended

    def _president(self) -> TcpLine | None:
        """A line to it; None: it is this rank."""
        for rank in range(self.rank):
            line = self._reach(rank)
            if line is not None:
                return line
        return None

    def _reach(self, rank: int) -> TcpLine | None:
        """A line to that rank, when it has come; None: it has ended, or its host refuses."""
        line, pause = self.point.call(rank), _REDIAL_FIRST
        while rank not in self.ended_here() and (at := self.known(line)) is not At.REFUSED:
            self.missing = {rank: at}
            if line.over():
                line.close()
                time.sleep(pause)
                pause = min(1.5 * pause, self.redial)
                line = self.point.call(rank)
            else:
                wait([line], _SLICE)
                line.hear()
                if line.at is At.OPEN:
                    return line
            if time.monotonic() >= self.deadline:
                line.close()
                raise self.late()
        line.close()
        return None

    def known(self, line: TcpLine) -> At:
        """What is known of its other end."""
        return line.at

    # --- following

    def here(self) -> dict[str, Any]:
        """What this rank says of itself and its host."""
        return {
            "here": sorted(self.ended_here()),
            "ended": sorted(self.known_to_have_ended()),
            "promised": self.promised.name if self.promised else None,
        }

    def _follow(self, line: TcpLine) -> Promise | None:
        """The promise that is to be kept; None: the president is lost."""
        said: dict[str, Any] = {}
        while not line.over():
            if (now := self.here()) != said:
                line.say(said := now)
            wait([line], _SLICE)
            for message in line.hear():
                if (made := self._do(message, line)) is not None:
                    return made
            if time.monotonic() >= self.deadline:
                raise self.late()
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
                if not self.promises:
                    return self.promised
                line.say({"made": name})
            except (CustomBackendError, DistError) as error:
                line.say({"failed": name, "kind": type(error).__name__, "error": str(error)})
        elif what == "keep" and self.promised is not None and message["name"] == self.promised.name:
            return self.promised
        elif what == "fail":
            if message["none"]:  # else an earlier president may have told others to go on
                self.break_promise()
            raise self.failure(str(message["kind"]), str(message["error"]))
        return None

    def failure(self, kind: str, text: str) -> CustomBackendError:
        return _KINDS.get(kind, TransportError)(f"shrink_group of group {self.name}, rank {self.rank}: {text}")

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

    def late(self) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"shrink_group of group {self.name}, rank {self.rank}: {self.text_of_missing(self.missing)}"
        )

    def text_of_missing(self, missing: Mapping[int, At]) -> str:
        if not missing:
            return f"the ranks that are left had not made a group in {time.monotonic() - self.began:.1f} s"
        (first, at), *more = ((self.old.who(rank), at.value) for rank, at in sorted(missing.items()))
        also = f" (nor did {', '.join(f'{who}: {at}' for who, at in more)})" if more else ""
        return (
            f"{first} neither came nor {self.ended} in {time.monotonic() - self.began:.1f} s: {at}{also}. Do all ranks "
            f"that are alive call shrink_group? One that hangs has to be ended{self.hint}."
        )


def _require(look: Callable[[], str | None]) -> None:
    if (why := look()) is not None:
        raise TransportError(why)


def wait(what: Iterable[Any], seconds: float) -> bool:
    """Whether one of those lines, or a meeting point, has something to say within that time."""
    poll = select.poll()
    for each in what:
        poll.register(each.fileno(), each.events() if hasattr(each, "events") else select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1e3))


_RECALL = 0.2  # s: between two calls of a rank that is not reached
_LAUNCHER_ENDS = 1.0  # s: within which a launcher ends the other ranks of a host that has lost one
_SOONER, _SOONER_MOST = 0.1, 1.0  # a president gives up sooner than the others, who hear from it who is missing


def _preside(own: SurvivorsOverHosts) -> Promise:
    president = _President(own)
    try:
        return president.run()
    except BaseException as error:
        president.give_up(error)
        raise
    finally:
        president.close()


class _President:
    """What the lowest of the ranks that are left does: it hears who has come and who has ended, has them make a group,
    and says what comes of it."""

    def __init__(self, own: SurvivorsOverHosts) -> None:
        self.own, self.point = own, own.point
        self._callers: list[TcpLine] = []  # that have not said who they are
        self._lines: dict[int, TcpLine] = {}  # of the ranks that have come
        self._said: dict[int, dict[str, Any]] = {}  # by them, of themselves and their hosts
        self._calls: dict[int, TcpLine] = {}  # to ranks of hosts from which nobody has come
        self._called_at: dict[int, float] = {}
        self._making = ""  # its name
        self._answers: dict[int, dict[str, Any]] = {}  # to that
        # all that are left have come and said what they promised: if this rank keeps none, none is kept
        self._knows = False
        self._over = False  # all have been told how it ends
        self._by = own.deadline - min(_SOONER_MOST, _SOONER * own.seconds)
        ends = launcher.watches() and own.hosts.others  # else it ends this rank, too
        self._settled_at = own.began + (min(_LAUNCHER_ENDS, own.seconds / 2) if ends else 0.0)

    def run(self) -> Promise:
        failed: tuple[list[int], str] | None = None
        while True:
            members = self._gather()
            self._knows = True
            promised = self.own.promised
            if promised is not None and all(self._said[rank]["promised"] == promised.name for rank in self._lines):
                return self._keep(promised)
            self.own.break_promise()
            if failed is not None and failed[0] == members:  # it was nobody's death
                self._fail(TransportError.__name__, f"the ranks that are left made no group: {failed[1]}; {RESTART}")
            reason = self._make(members)
            if reason is None:
                assert self.own.promised is not None
                return self._keep(self.own.promised)
            self._tell({"do": "again"})
            self.own.break_promise()
            failed = members, reason
            self._hear(self.own.settle)

    def give_up(self, error: BaseException) -> None:
        """Tells the others that this rank presides no longer, without waiting for them."""
        if not self._over:
            self._over = True
            if self._knows:
                self.own.break_promise()
            text = f"{self.own.old.who(self.own.rank)}, which presided, gave up: {type(error).__name__}: {error}"
            self._tell({"do": "fail", "kind": AbortedError.__name__, "error": text, "none": self._knows})

    def close(self) -> None:
        for line in (*self._callers, *self._lines.values(), *self._calls.values()):
            line.close()

    # --- who has come, who has ended

    def _gather(self) -> list[int]:
        """The ranks that are left, all of which have come."""
        told: dict[int, At] | None = None
        while True:
            missing = self._missing()
            self.own.missing = missing
            if not missing and not self._more_may_end():
                return sorted([self.own.rank, *self._lines])
            if missing != told:
                told = missing
                self._tell({"do": "missing", "for": [(rank, at.name) for rank, at in missing.items()]})
            if time.monotonic() >= self._by:
                self._fail(CollectiveTimeoutError.__name__, self.own.text_of_missing(missing))
            self._hear(_SLICE, enough=True)

    def _more_may_end(self) -> bool:
        """Whether a launcher may be ending ranks that have come, of a host that has lost one. A rank that died while
        MPI makes a communicator would take others with it: MPICH crashes in a send to a process that is gone."""
        if time.monotonic() >= self._settled_at:
            return False
        come = {self.own.rank, *self._said}
        return any(0 < len(come.intersection(ranks)) < len(ranks) for ranks in self.own.hosts.ranks)

    def _missing(self) -> dict[int, At]:
        """What is known of the ranks that have neither come nor ended."""
        evidence = self.own.known_to_have_ended().union(*(said["ended"] for said in self._said.values()))
        missing: dict[int, At] = {}
        for number, ranks in enumerate(self.own.hosts.ranks):
            present = [rank for rank in ranks if rank in self._said]
            if number == self.own.hosts.mine or present:
                ended = self.own.ended_here().union(*(self._said[rank]["here"] for rank in present))
                awaited = {rank: At.CALLED for rank in ranks if rank not in ended}
                self._stop_calling(ranks)
            else:
                awaited = {rank: self._called(rank) for rank in ranks}
                if ranks[0] in evidence and set(awaited.values()) == {At.REFUSED}:
                    awaited = {}
            missing.update({r: at for r, at in awaited.items() if r != self.own.rank and r not in self._said})
        return missing

    def _called(self, rank: int) -> At:
        """What a call of that rank has come to."""
        line, now = self._calls.get(rank), time.monotonic()
        if line is None or line.at is not At.REFUSED and line.over() and now >= self._called_at[rank] + _RECALL:
            if line is not None:
                line.close()
            line, self._called_at[rank] = self.point.call(rank), now
            self._calls[rank] = line
        return line.at

    def _stop_calling(self, ranks: list[int]) -> None:
        for rank in ranks:
            if rank in self._calls:
                self._calls.pop(rank).close()

    def _hear(self, seconds: float, enough: bool = False) -> None:
        """All that is said in that time; ``enough``: until something is."""
        until = time.monotonic() + seconds
        while True:
            calls = [line for line in self._calls.values() if not line.over()]
            heard = wait([self.point, *self._callers, *self._lines.values(), *calls], until - time.monotonic())
            for line in calls:
                line.hear()
            self._callers += self.point.answer()
            for line in list(self._callers):
                self._hear_caller(line)
            for rank, line in list(self._lines.items()):
                for message in line.hear():
                    self._heard(rank, message)
                if line.over():
                    self._drop(rank)
            if heard and enough or time.monotonic() >= until:
                return

    def _hear_caller(self, line: TcpLine) -> None:
        messages = line.hear()
        if line.at is At.CALLED and len(self._callers) <= len(self._lines) + self.own.old.size + STRANGERS:
            return
        self._callers.remove(line)
        rank = line.peer
        if line.at is not At.OPEN or rank is None or not self.own.rank < rank < self.own.old.size:
            line.close()
            return
        self._drop(rank)  # of an earlier call of shrink_group, by the same rank
        self._lines[rank] = line
        for message in messages:
            self._heard(rank, message)

    def _heard(self, rank: int, message: dict[str, Any]) -> None:
        if "here" in message:
            self._said[rank] = message
        elif self._making and self._making in (message.get("made"), message.get("failed")):
            self._answers[rank] = message

    def _drop(self, rank: int) -> None:
        if rank in self._lines:
            self._lines.pop(rank).close()
        self._said.pop(rank, None)
        self._answers.pop(rank, None)

    # --- making a group

    def _make(self, members: list[int]) -> str | None:
        """None: all have promised to go on with it; else why not."""
        name = self._making = f"{self.own.rank}.{secrets.token_hex(8)}"
        self._answers = {}
        store = serve(self._by - time.monotonic())
        self._tell({"do": "make", "name": name, "members": members, "port": store.port})

        def look() -> str | None:
            self._hear(0.0)
            return self._in_vain(members)

        try:
            self.own.promised = self.own.make(name, members, store, look)
        except (CustomBackendError, DistError) as error:
            return self._in_vain(members) or str(error)
        while self.own.promises and len(self._answers) < len(members) - 1 and not self._in_vain(members):
            self._hear(_SLICE, enough=True)
            if time.monotonic() >= self._by:
                silent = {rank: At.CALLED for rank in members[1:] if rank not in self._answers}
                self._fail(CollectiveTimeoutError.__name__, self.own.text_of_missing(silent))
        return self._in_vain(members) if self.own.promises else None

    def _in_vain(self, members: list[int]) -> str | None:
        for rank in members:
            if rank != self.own.rank and rank not in self._lines:
                return f"{self.own.old.who(rank)} was lost"
            if "failed" in (answer := self._answers.get(rank, {})):
                return f"{self.own.old.who(rank)}: {answer['error']}"
        return None

    # --- what comes of it

    def _keep(self, promised: Promise) -> Promise:
        self._over = True
        self._tell({"do": "keep", "name": promised.name})
        return promised

    def _fail(self, kind: str, text: str) -> NoReturn:
        self._over = True
        if self._knows:
            self.own.break_promise()
        self._tell({"do": "fail", "kind": kind, "error": text, "none": self._knows})
        raise self.own.failure(kind, text)

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._lines.values():
            line.say(message)
