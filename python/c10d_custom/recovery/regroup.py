"""A group of processes that a program has named by their handles, whether or not they were in one before.

The first of them serves the group's store. On one host they then meet by datagrams, whose names the handles tell;
over several as the ranks of any group do. Who waits for long tells each other member so, in the store that this one
serves, and with which handles: so each knows who has come, and two that were given different ones hear of it, both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore

from ..creation import Processes
from ..creation.exchange import peek
from ..creation.local_datagrams import Neighbours
from ..errors import CollectiveMismatchError, CustomBackendError, PeerLostError, TransportError, UsageError
from ..threads import start, threading, time
from .handle import Handle, NotServedError, handle_of

if TYPE_CHECKING:
    from .handle import Endpoint

_AGAIN = 0.1  # s: between two tries to reach a store
_PATIENCE = 0.3  # s: after which a member that still waits tells the others that it has come


class Roster:
    """The members of one group that is to be made: ``handles``, in the order of ranks if it is a sequence. ``number``:
    one that no other group of theirs has. UsageError for what no group can come of."""

    def __init__(self, endpoint: Endpoint, number: int, handles: Sequence[str] | AbstractSet[str]) -> None:
        self._endpoint, self.number = endpoint, number
        texts = list(handles) if isinstance(handles, (list, tuple)) else sorted(handles)
        self.members = [handle_of(text) for text in texts]
        own = endpoint.handle.text
        if own not in texts:
            raise UsageError(f"reconfigure: the handle of this process, {endpoint.handle}, is not among those given")
        if len(set(texts)) < len(texts):
            raise UsageError(f"reconfigure: {max(texts, key=texts.count)[:60]} is among the handles twice")
        if number in endpoint.used:
            raise UsageError(f"reconfigure: uuid {number} was used before; each group that is made takes a new one")
        self.rank, self.size = texts.index(own), len(texts)
        ordered = not isinstance(handles, AbstractSet)
        self.digest = hashlib.sha256("\n".join([f"{number} {ordered}", *texts]).encode()).hexdigest()[:16]
        self._key, self._began = f"regroup/{number}", time.monotonic()
        self._untold = [member for member in self.members if member.text != own]
        self._word = json.dumps([own, self.digest, texts])
        self.unreached: dict[str, str] = {}
        self.ruled_out = False  # whether all have come, and there can be no group of them

    @property
    def neighbours(self) -> Neighbours | None:
        """Of members that can write to each other: all are on one host, and run as one user."""
        places = [member.place for member in self.members]
        if len({(place.host, place.uid) for place in places}) > 1 or not all(place.mailbox for place in places):
            return None
        assert self._endpoint.mailbox is not None
        known = {place.pid: place.started for place in places}
        names = [place.mailbox for place in places]
        return Neighbours(self._endpoint.mailbox, names, known, era=f"{self.number} {self.digest}")

    def processes(self) -> Processes:
        """Those whose end can be seen from here. PeerLostError if one has ended."""
        seen, ended = Processes(lambda rank: f"rank {rank}, {self.members[rank]}"), []
        for rank, member in enumerate(self.members):
            here = member.sees == self._endpoint.handle.sees
            if here and not seen.add(rank, member.place.pid, member.place.started):
                ended.append(str(member))
        if ended:
            seen.close()
            raise PeerLostError(f"{', '.join(ended)} has ended")
        return seen

    def store(self, seconds: float) -> Any:
        """The new group's own, which its first member serves. That one may be stopped for a while."""
        until = time.monotonic() + seconds
        while True:
            if self.members[0].has_ended():
                raise PeerLostError(f"{self.members[0]} has ended")
            try:
                found = self._endpoint.store_of(self.members[0], max(until - time.monotonic(), 0))
                return PrefixStore(f"{self._key}/{self.digest}", found)
            except NotServedError as error:
                raise TransportError(str(error)) from error
            except TransportError:
                if time.monotonic() >= until:
                    raise
            time.sleep(_AGAIN)
            self.look()

    # --- who has come

    def look(self) -> None:
        """Called now and then in a long wait. CollectiveMismatchError once another is known to have been given other
        handles."""
        if time.monotonic() < self._began + _PATIENCE:
            return
        while self._untold:
            self._tell(self._untold.pop())
        given = {text: texts for text, digest, texts in self._heard() if digest != self.digest}
        if not given:
            return
        for text in given:
            self._tell(Handle(text)).join(_PATIENCE)
        given[self._endpoint.handle.text] = [member.text for member in self.members]
        table = "\n".join(
            f"  {Handle(text)}: {', '.join(str(Handle(each)) for each in texts)}" for text, texts in given.items()
        )
        raise CollectiveMismatchError(
            f"the processes were given different handles for uuid {self.number}:\n{table}\nGive all the same, either "
            "in one order, as a list, or as a set."
        )

    def waiting(self) -> set[int]:
        """The ranks that are known to wait for this group."""
        texts = {text for text, digest, _ in self._heard() if digest == self.digest}
        return {rank for rank, member in enumerate(self.members) if member.text in texts or rank == self.rank}

    def absent(self) -> str:
        """Who has not come, for an error's end."""
        if self.ruled_out:
            return ""
        away = [(rank, self.members[rank]) for rank in sorted(set(range(self.size)) - self.waiting())]
        named = "; ".join(f"rank {rank}: {member}{self.unreached.get(member.text, '')}" for rank, member in away)
        return f" Not known to have come: {named}." if away else ""

    def _tell(self, member: Handle) -> threading.Thread:
        """In a thread: a process that is stopped does not answer."""

        def tell() -> None:
            try:
                member.store().append(self._key, f"{self._word}\n")  # type: ignore[attr-defined]
            except (CustomBackendError, RuntimeError) as error:
                self.unreached[member.text] = f", which does not answer ({error})"

        return start(tell, "c10d_custom:tell")

    def _heard(self) -> list[Any]:
        said = peek(self._endpoint.store, self._key)
        return [json.loads(line) for line in (said or b"").splitlines()]


def explained(error: CustomBackendError, roster: Roster) -> CustomBackendError:
    """The error with which regrouping has failed: which it was, and who was not there."""
    more = roster.absent() if isinstance(error, TransportError) else ""
    if isinstance(error, PeerLostError):  # by its rank, perhaps, and PID
        lost = [str(member) for member in roster.members if f"(pid {member.pid}) " in str(error)]
        more = f" That is {'; '.join(lost)}." if lost else ""
    return type(error)(f"reconfigure with uuid {roster.number}: {error}{more}")
