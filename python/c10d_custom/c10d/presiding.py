"""What the lowest of the ranks that are left over hosts does, when a group is shrunk: it hears who has come and who has
ended, has them make a group, and says what comes of it. survivors_over_hosts.py has the protocol."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import DistError, TCPStore

from ..errors import AbortedError, CollectiveTimeoutError, CustomBackendError, TransportError
from ..launch import launcher
from ..transport.hosts.line import At
from .survivors_over_hosts import RESTART, Promise, SurvivorsOverHosts, wait

if TYPE_CHECKING:
    from ..transport.hosts.line import Line

_SLICE = 20e-3  # s: between two looks at this host's ranks
_REDIAL = 0.2  # s: between two calls of a rank that is not reached
_SETTLE = 0.2  # s: for the news of a loss, once a making has failed
_LAUNCHER_ENDS = 1.0  # s: within which a launcher ends the other ranks of a host that has lost one
_STRANGERS = 64  # callers that have not said who they are, besides one for each rank
_SOONER, _SOONER_MOST = 0.1, 1.0  # a president gives up sooner than the others, who hear from it who is missing


def preside(own: SurvivorsOverHosts) -> Promise:
    president = _President(own)
    try:
        return president.run()
    except BaseException as error:
        president.give_up(error)
        raise
    finally:
        president.close()


class _President:
    def __init__(self, own: SurvivorsOverHosts) -> None:
        self.own, self.point = own, own.point
        self._callers: list[Line] = []  # that have not said who they are
        self._lines: dict[int, Line] = {}  # of the ranks that have come
        self._said: dict[int, dict[str, Any]] = {}  # by them, of themselves and their hosts
        self._calls: dict[int, Line] = {}  # to ranks of hosts from which nobody has come
        self._called_at: dict[int, float] = {}
        self._refused: set[int] = set()
        self._making = ""  # its name
        self._answers: dict[int, dict[str, Any]] = {}  # to that
        self._knows = False  # what an earlier president can have decided
        self._over = False  # all have been told how it ends
        self._by = own.deadline - min(_SOONER_MOST, _SOONER * own.seconds)
        self._settled_at = own.began + (min(_LAUNCHER_ENDS, own.seconds / 2) if launcher.watches() else 0.0)

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
            self._hear(_SETTLE)

    def give_up(self, error: BaseException) -> None:
        """Not with the others' consent."""
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
            self._hear(_SLICE, enough=True)
            missing = self._missing()
            self.own.missing = missing
            if not missing and not self._more_may_end():
                return sorted([self.own.rank, *self._lines])
            if missing != told:
                told = missing
                self._tell({"do": "missing", "for": [(rank, at.name) for rank, at in missing.items()]})
            if time.monotonic() >= self._by:
                self._fail(CollectiveTimeoutError.__name__, self.own.text_of_missing(missing))

    def _more_may_end(self) -> bool:
        """Whether a launcher may be ending ranks that have come, of a host that has lost one. A rank that died while
        MPI makes a communicator would take others with it: MPICH crashes in a send to a process that is gone."""
        if time.monotonic() >= self._settled_at:
            return False
        come = {self.own.rank, *self._said}
        return any(0 < len(come.intersection(ranks)) < len(ranks) for ranks in self.own.old.hosts.ranks)

    def _missing(self) -> dict[int, At]:
        """What is known of the ranks that have neither come nor ended."""
        evidence = self.own.known_to_have_ended().union(*(said["ended"] for said in self._said.values()))
        missing: dict[int, At] = {}
        for number, ranks in enumerate(self.own.old.hosts.ranks):
            present = [rank for rank in ranks if rank in self._said]
            if number == self.own.old.hosts.mine or present:
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
        if rank in self._refused:
            return At.REFUSED
        line = self._calls.get(rank)
        if line is None or line.over() and time.monotonic() >= self._called_at[rank] + _REDIAL:
            if line is not None:
                line.close()
            line = self._calls[rank] = self.point.call(rank)
            self._called_at[rank] = time.monotonic()
        if line.at is At.REFUSED:
            self._refused.add(rank)
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

    def _hear_caller(self, line: Line) -> None:
        messages = line.hear()
        if line.at is At.CALLED and len(self._callers) <= len(self._lines) + self.own.old.size + _STRANGERS:
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
        left = timedelta(seconds=max(self._by - time.monotonic(), 0.001))
        store = TCPStore("127.0.0.1", 0, None, True, left, wait_for_workers=False)
        self._tell({"do": "make", "name": name, "members": members, "port": store.port})

        def look() -> str | None:
            self._hear(0.0)
            return self._in_vain(members)

        try:
            self.own.promised = self.own.make(name, members, store, look)
        except (CustomBackendError, DistError) as error:
            return self._in_vain(members) or str(error)
        while len(self._answers) < len(members) - 1 and not self._in_vain(members):
            self._hear(_SLICE, enough=True)
            if time.monotonic() >= self._by:
                silent = {rank: At.CALLED for rank in members[1:] if rank not in self._answers}
                self._fail(CollectiveTimeoutError.__name__, self.own.text_of_missing(silent))
        return self._in_vain(members)

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
