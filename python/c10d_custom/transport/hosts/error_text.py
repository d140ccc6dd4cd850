"""The words of an error over hosts for a rank that has died or is late, with its host's name, and what the other ranks
say of it in the store; transport/failure.py makes the sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import PrefixStore

from ... import native
from ...call import ANY_COUNT
from ...creation.exchange import Exchange
from ...errors import AbortedError, CollectiveMismatchError, CustomBackendError, TransportError
from ...threads import start
from .. import rank_name
from ..call_log import Fingerprint
from ..disagreement import mismatch_table, sizes_of
from ..failure import ErrorText
from .flat_exchange import fingerprint, parse

if TYPE_CHECKING:
    from torch.distributed import Store

    from ...call import Call
    from ...creation.topology import Location
    from ..disagreement import Sizes
    from ..trouble import Trouble
    from .failure_detector import FailureDetector, Fault


_HEARD = 0.5  # s: for the store
_CAME_LATE = 10_000_000  # ns: a rank whose call has failed so soon comes to one that the others had given up

_OVER = (
    "That send had been reported as done before the receiver refused it, so this later call raises its error. "
    "If this call is a send or receive, it was not posted: call it again. If it is a collective, it was carried out. "
    "The group goes on."
)


class Observed(Protocol):
    """What is asked of whoever knows what has become of ranks."""

    locations: Sequence[Location]
    detector: FailureDetector


class Group(Observed, Protocol):
    """What error texts ask of the transport."""

    rank: int
    size: int
    members: list[int]
    store: Store
    published: set[int]  # collectives that failed, of which this rank has told the others
    refused: dict[int, Call]  # of the last that this rank has refused, what it told the others
    mpi_finalized: bool

    def who(self, rank: int) -> str: ...


class HostsErrorText(ErrorText):
    t: Group
    f: Trouble

    def who(self, rank: int) -> str:
        return self.t.who(rank)

    def fate(self, rank: int) -> str:
        return f"{rank_name(self.t.members, rank)} {fate(self.t, rank)}"

    def missing(self) -> str:
        # This rank knows whom it waited for, and they may have waited for others: those who timed out alike say so in
        # the store.
        said, _ = _published(self.t, self.f.seq, self.call, 0.3)
        late: Sequence[int] = [r for r, fingerprint in said.items() if fingerprint is None]
        if len(late) == self.t.size - 1:
            late = self.f.missing or ([self.f.peer] if self.f.peer >= 0 else [])
        return f"Missing: {', '.join(self.who(r) for r in late)}. (This is collective #{self.f.seq}.)" if late else ""

    def late(self) -> bool:
        # Whether the others had given up when this rank came. That they name it as missing is not enough: a leader is
        # waited for while it waits for the ranks of its host.
        return self.f.by >= 0 and self.f.elapsed_ns < _CAME_LATE

    def _of(self, status: int, found_by: str) -> CustomBackendError:
        if status == native.ABORTED and self.t.mpi_finalized:
            return AbortedError(
                f"{self.where}: the program has finalised MPI (MPI.Finalize), by which this group's hosts reach each "
                "other, and thereby ended the group: leave that to us, or destroy the groups before."
            )
        return super()._of(status, found_by)

    def _mismatch(self, found_by: str) -> CollectiveMismatchError:
        error = super()._mismatch(found_by)
        return CollectiveMismatchError(f"{error} {_OVER}") if self.f.over else error

    def table(self) -> str:
        # Where no rank is named all have called, and parts do not fit (flat_exchange.py, two_level.py).
        prints, sizes = _published(self.t, self.f.seq, self.call, 3.0 if self.f.peer < 0 else 1.0)
        return mismatch_table(prints, self.t.members, sizes)


def fate(group: Observed, rank: int) -> str:
    """What has become of a rank that is gone: the part of a sentence that follows its name."""
    host = f"on {group.locations[rank].hostname}"
    if rank in group.detector.left:
        return f"{host} has left the group (destroy_process_group, or its process ended)"
    return f"{host} (pid {group.locations[rank].pid}) has died, or its host is gone"


def _published(
    transport: Group, number: int, call: Call, seconds: float
) -> tuple[dict[int, Fingerprint | None], dict[int, Sizes]]:
    """Every rank's fingerprint of a collective that failed, and the sizes of its parts where they are uneven, as far as
    they say so in time."""
    store = PrefixStore(f"failed/{number}", transport.store)
    exchange = Exchange(store, transport.rank, transport.size, seconds)
    transport.published.add(number)
    prints: dict[int, Fingerprint | None] = dict.fromkeys(range(transport.size))
    sizes: dict[int, Sizes] = {}

    def note(rank: int, said: Sequence[Any]) -> None:
        *fields, parts = said
        if parts is not None:
            sizes[rank] = parts
        prints[rank] = Fingerprint(*fields)

    mine = [*parse(fingerprint(number, call)), sizes_of(call, transport.size) if call.count == ANY_COUNT else None]
    note(transport.rank, mine)

    def ask() -> None:
        try:
            exchange.say(str(transport.rank), mine)
            for rank in range(transport.size):
                try:
                    note(rank, exchange.hear(str(rank), f"rank {rank}"))
                except TransportError:
                    pass  # it has not called, or its process is gone
            _heard(store, transport.size)
        except RuntimeError:
            pass  # the store is gone with the process that served it

    # In a thread: a TCPStore behind a network that is cut waits without end, whatever the time-out.
    start(ask, "c10d_custom:ask").join(seconds + 0.2)
    return dict(prints), dict(sizes)


def tell_what_was_refused(transport: Group, fault: Fault) -> None:
    """Called with a Fault that another rank reports. Who refused the call that the others differ in raises an error of
    its own, and asks nobody; but they want its line for theirs."""
    call = transport.refused.get(fault.number)
    if call is None or fault.status != native.MISMATCH or fault.number in transport.published:
        return
    transport.published.add(fault.number)
    mine = [*parse(fingerprint(fault.number, call)), None]

    def tell() -> None:
        store = PrefixStore(f"failed/{fault.number}", transport.store)
        with contextlib.suppress(RuntimeError):
            Exchange(store, transport.rank, transport.size, _HEARD).say(str(transport.rank), mine)
            _heard(store, transport.size)

    with contextlib.suppress(RuntimeError):  # no more threads: the others wait for its line in vain, for a second
        start(tell, "c10d_custom:ask")


def heard_of(transport: Group, fault: Fault | None) -> None:
    """Called by a rank that leaves its group. If a collective failed on others, and this rank has raised no error for
    it, it counts as having heard all the same: the last to have heard deletes what was published."""
    if fault is None or fault.status not in (native.MISMATCH, native.TIMEOUT) or not fault.number:
        return
    if fault.number in transport.published:
        return

    def tell() -> None:
        with contextlib.suppress(RuntimeError):
            _heard(PrefixStore(f"failed/{fault.number}", transport.store), transport.size)

    start(tell, "c10d_custom:ask").join(_HEARD)


def _heard(store: Store, size: int) -> None:
    """This rank wants to hear no more of it. The last one takes what was said out of the store."""
    if store.add("heard", 1) == size:
        for key in ("heard", *map(str, range(size))):
            store.delete_key(key)
