"""The words of an error on one host for a rank that has died or is late, and for what each rank does, as the segment
shows it; transport/failure.py makes the sentence."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any

from ... import native
from ...call import ANY_COUNT
from ...native import lib
from ..failure import ErrorText

if TYPE_CHECKING:
    from ...call import Call, Message
    from ...native import Failure, PeerState
    from ..call_log import Fingerprint, Peer
    from ..disagreement import Sizes


_TOLD = 16  # ranks of which an error tells what they do


class ShmErrorText(ErrorText):
    """``states``: see ShmTransport.states; None once the group is closed."""

    def __init__(self, transport: Any, failure: Failure, call: Call | Message, states: list[PeerState] | None) -> None:
        self.states = states
        super().__init__(transport, failure, call)

    def who(self, rank: int) -> str:
        return self.t.who(rank)

    def fate(self, rank: int) -> str:
        who = self.who(rank)
        if self.states is None or rank >= len(self.states):
            return f"{who} is gone"
        state = self.states[rank]
        if state.state == native.LEFT:
            return f"{who} has left the group (destroy_process_group, or its process ended)"
        return f"{who} (pid {state.pid}) has died"

    def missing(self) -> str:
        if self.states is None:
            return ""
        seq, mine = self.f.seq, self.states[self.t.rank].arrived
        before = ""
        if mine < seq:
            before, seq = f"It waits for earlier calls of this rank: {self.doing([self.t.rank])} ", mine
        late = [r for r, s in enumerate(self.states) if s.arrived < seq]
        if late:
            return f"{before}Missing: {', '.join(self.who(r) for r in late)}. {self.doing(range(self.t.size))}"
        return (
            f"{before}All ranks have entered it; behind: {', '.join(self.who(r) for r in self._behind())}. "
            f"{self.doing(range(self.t.size))}"
        )

    def _behind(self) -> list[int]:
        # As in straggler of the core's collective.h, by those of its counters that a PeerState has.
        done = [s.blocks_in + s.blocks_reduced + s.blocks_out for s in self.states or []]
        least = min((n for r, n in enumerate(done) if r != self.t.rank), default=0)
        return [r for r, n in enumerate(done) if r != self.t.rank and n == least]

    def late(self) -> bool:
        if self.f.peer == self.t.rank:
            return True
        here, there = (self.states[r].arrived if self.states else 0 for r in (self.t.rank, self.f.by))
        return here < self.f.seq <= there

    def doing(self, ranks: Sequence[int]) -> str:
        if self.states is None:
            return ""
        peers = self.t.peers()
        known = [self._doing(peers[r]) for r in list(ranks)[:_TOLD]]
        more = len(ranks) - len(known)
        return "; ".join(known) + (f"; and {more} more ranks." if more else ".")

    def _doing(self, peer: Peer) -> str:
        process = {"stopped": "; its process is stopped", "gone": "; its process has died", "left": "; it has left"}
        who = f"{self.who(peer.rank)} (pid {peer.pid}{process.get(peer.state, '')})"
        if peer.rank == self.t.rank:
            who = "this rank"
        if peer.calling == "-":
            return f"{who} has entered {peer.entered} collectives"
        return f"{who} last entered {peer.calling}"

    def table(self) -> str:
        from ..call_log import published  # not at an exit: see failure.py
        from ..disagreement import mismatch_table

        prints = {r: published(s) for r, s in enumerate(self.states)} if self.states else {}
        sizes = {r: self._sizes(r, f) for r, f in prints.items() if f is not None and f.count == ANY_COUNT}
        return mismatch_table(prints, self.t.members, {r: known for r, known in sizes.items() if known})

    def _sizes(self, rank: int, fingerprint: Fingerprint) -> Sizes | None:
        n = self.t.size
        sizes = (c_uint64 * (2 * n))()
        if lib.c10d_peer_sizes(self.t._handle, rank, fingerprint.seq, sizes):
            return None
        return sizes[:n], sizes[n:]
