"""Who is gone, and whether a group over hosts is still of use: what the failure detector has heard of other hosts, and
what the shared memory shows of this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ... import native
from ...errors import TransportError
from ...threads import NEWS, time, wait_until
from ..trouble import Trouble
from .failure_detector import Fault

if TYPE_CHECKING:
    from ...native import Failure
    from .. import LocalTransport
    from .failure_detector import FailureDetector
    from .layout import Hosts


# Added to the group rank of a rank of another host in the shared segment's record of what ended the group, whose own
# ranks are counted on this host (`group_rank` tells them apart).
_REMOTE = 1 << 20
# s: how long what a rank sent before it left may still be on its way.
_GRACE = 1.0
_REASON = 0.3  # s: for the news of why a neighbour left


def group_rank(hosts: Hosts, index: int) -> int:
    """Returns the group rank of what the local group numbers as one of its ranks."""
    return index - _REMOTE if index >= _REMOTE else hosts.here[index] if index >= 0 else -1


class Health:
    """``local``: the transport inside this host; ``stop``: called once the group has ended, so that nothing takes the
    fast path; ``abandon``: called if MPI may no longer end in good order, with whether a rank is no more than late.
    ``detector`` is set once it is there."""

    detector: FailureDetector

    def __init__(
        self, rank: int, hosts: Hosts, local: LocalTransport, stop: Callable[[], None], abandon: Callable[[bool], None]
    ) -> None:
        self.rank, self.hosts, self.local = rank, hosts, local
        self._stop, self._abandon = stop, abandon
        self._left_at: dict[int, float] = {}
        self.over = False  # this rank has left

    def check(self, peers: Sequence[int], number: int = native.NEVER) -> None:
        """Raises Trouble if the group is of no more use, at least not for the collective ``number``, or a rank of
        ``peers`` has left it."""
        self.check_quickly(number)
        failure = self.local.health(number)
        if failure is not None:
            raise self.trouble(failure)
        for peer in peers:
            if peer in self.detector.left:
                first = self._left_at.setdefault(peer, time.monotonic())
                if time.monotonic() - first > _GRACE:
                    raise Trouble(native.PEER_LOST, peer)

    def check_quickly(self, number: int = native.NEVER) -> None:
        """Does what `check` does, by what is known already."""
        if self.over:
            raise Trouble(native.ABORTED)
        fault = self.detector.trouble(number)
        if fault is not None:
            if fault.status in native.ENDED_HERE and fault.by == self.rank:
                raise Trouble(fault.status)
            raise Trouble(native.BROKEN, fault.peer, fault.by, fault.status, seq=fault.number)

    def broken(self) -> bool:
        try:
            self.check([])
        except Trouble:
            return True
        return False

    def sound(self) -> bool:
        """Whether no rank has reported a failure."""
        return self.detector.trouble(native.NEVER) is None

    # --- news

    def abort(self, number: int = 0, status: int = native.ABORTED) -> None:
        """This rank ends the group, amid the collective ``number``; ``status``: INTERRUPTED where a signal handler has
        raised."""
        self.spread(Fault(status, self.rank, self.rank, number))

    def spread(self, fault: Fault) -> None:
        """Tells all ranks of a fault."""
        self.record(fault)
        self.detector.report(fault)

    def record(self, fault: Fault) -> None:
        """Acts on a Fault for the ranks of this host."""
        self._stop()
        self._abandon_if_lost(fault.status, fault.peer)
        if fault.status in native.ENDED_HERE and (known := self.local.health(native.NEVER)) is not None:
            self.trouble(known)  # of which this rank might not hear otherwise
        self.local.end_for_all(fault.status, self._index(fault.peer), self._index(fault.by), fault.number)

    def _abandon_if_lost(self, status: int, peer: int) -> None:
        # One that has left is alive, and waits for the others in MPI's Finalize.
        left = self.detector.left if hasattr(self, "detector") else ()
        if status == native.TIMEOUT or status == native.PEER_LOST and peer not in left:
            self._abandon(status == native.TIMEOUT)

    def tell_what_this_host_knows(self) -> None:
        """Before leaving. The shared memory may show what the detector has not heard: a rank that has just died, of
        which the others would see no more than this rank's end; or that a neighbour gave up, whose news of the reason
        is about to come."""
        failure = self.local.health(native.NEVER)
        if failure is None:
            return
        status = failure.status
        if status == native.BROKEN:
            wait_until(lambda: not self.sound(), NEWS, _REASON)
            status = failure.cause
        if self.sound() and status in (native.PEER_LOST, native.TIMEOUT):
            self.spread(Fault(status, self.trouble(failure).peer, self.rank, 0))

    # --- reasons

    def why_left(self, trouble: Trouble) -> Trouble:
        """A neighbour that leaves in the middle of a call has a reason, a lost rank for one, and has told it before;
        but the shared memory may show that it left before the news is here."""
        if trouble.peer not in self.hosts.here:
            return trouble
        states = self.local.states(0)
        if states is None or states[self.hosts.here.index(trouble.peer)].state != native.LEFT:
            return trouble

        def left() -> bool:
            self.check_quickly()
            return trouble.peer in self.detector.left

        try:
            wait_until(left, NEWS, _REASON)
            self.check_quickly()
        except Trouble as reason:
            return reason
        return trouble

    def explain(self, error: Exception) -> Trouble | TransportError:
        """The Trouble behind an error of MPI's, which may come before the news of a lost rank."""
        try:
            wait_until(lambda: self.check([]), NEWS, _GRACE)
        except Trouble as trouble:
            return trouble
        return error if isinstance(error, TransportError) else TransportError(f"MPI: {error}")

    def trouble(self, failure: Failure) -> Trouble:
        """The Trouble for a native Failure of the local group."""
        peer = group_rank(self.hosts, failure.peer)
        if failure.status == native.BROKEN:  # by a neighbour's word: the detector's may come later, or never
            self._abandon_if_lost(failure.cause, peer)
        return Trouble(failure.status, peer, group_rank(self.hosts, failure.by), failure.cause, seq=failure.seq)

    # --- ranks, as the local group knows them

    def _index(self, rank: int) -> int:
        if rank < 0:
            return -1
        return self.hosts.here.index(rank) if rank in self.hosts.here else rank + _REMOTE
