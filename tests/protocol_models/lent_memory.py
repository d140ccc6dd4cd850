"""Memory of one rank that the leader of a group maps and writes (transport/cuda/in_place.py, mappings.py): which
allocation a mapping really shows, and how long it must stay. The rank's user frees and allocates as it likes between
calls, at two places; an allocation is (number, place), and who opens a place that is open already gets what was opened
first. Calls may fail at any moment, with the leader's kernel still running; either rank may die.

Allocations exist while the user has them or the rank's transport keeps them. The leader's kernel must find what it
was told of, for as long as it runs."""

from dataclasses import dataclass
from typing import NamedTuple

NOTHING = (0, 0)


class Rank(NamedTuple):
    step: str  # idle, called, failed, closing, over, dead
    has: tuple  # the user's allocation, or NOTHING
    keeps: tuple  # the transport's
    told: tuple  # the leader may have these open
    calls: int  # to come
    made: int  # allocations, so far


class Leader(NamedTuple):
    step: str  # waiting, kernel, failed, over, dead
    open: tuple  # (what it was told of, what the mapping shows)
    kernel: tuple  # what it works on, as the mapping shows it, or NOTHING
    mark: bool  # it has nothing open any more


@dataclass(frozen=True)
class LentMemory:
    calls: int = 2
    allocations: int = 3
    most: int = 2
    dies: bool = True
    # Mutations:
    by_place: bool = False  # the leader knows allocations by their handles
    closes_stale: bool = True  # what lies where a newer one does is closed first
    waits: bool = True  # a rank's call ends when the leader's kernel has
    keeps_failed: bool = True  # the tensors of a call that failed stay until the leader has marked
    idle_first: bool = True  # the leader closes, and marks, once its kernel has ended
    tells_freed: bool = True
    closes_at_end: bool = True

    # State: (Rank, Leader, words, said, broken). words: (allocation, freed) that the rank has told, or None; said: the
    # leader's kernel is done; broken: the group is of no more use.

    def initial(self):
        rank = Rank("idle", (1, 0), (), (), self.calls, 1)
        return rank, Leader("waiting", (), NOTHING, False), None, False, False

    def over(self, state):
        rank, leader, *_ = state
        return rank.step in ("over", "dead") and leader.step in ("over", "dead")

    def wrong(self, state):
        rank, leader, words, _, _ = state
        alive = rank.step != "dead"
        if leader.kernel != NOTHING and leader.step != "dead":
            if leader.step == "kernel" and leader.kernel != leader.open[-1][0]:
                return "the kernel works on other memory than was told"
            if alive and leader.kernel not in (rank.has, *rank.keeps):
                return "the kernel works on memory that is not there any more"
            if leader.kernel not in [shows for _, shows in leader.open]:
                return "the leader has closed what its kernel works on"
        if len(leader.open) > self.most:
            return "too much is open"
        if leader.step == "over" and leader.kernel == NOTHING and leader.mark and leader.open:
            return "something stays open"
        if alive and leader.step == "waiting" and words is None:
            left = [told for told, _ in leader.open if told not in rank.told]
            if left:
                return f"{left[0]} stays open that its owner has freed"
        return None

    def steps(self, state):
        rank, leader, words, said, broken = state
        out = []

        def to(name, rank=rank, leader=leader, words=words, said=said, broken=broken):
            out.append((name, (rank, leader, words, said, broken)))

        if rank.step != "dead":
            self._user(rank, to)
            self._rank(rank, leader, said, broken, to)
        if leader.step != "dead":
            self._leader(rank, leader, words, broken, to)
        if self.dies and "dead" not in (rank.step, leader.step):
            if rank.step != "over":
                to("rank dies", rank=rank._replace(step="dead"), broken=True)
            if leader.step != "over":
                to("leader dies", leader=leader._replace(step="dead", kernel=NOTHING), broken=True)
        return out

    def _user(self, rank, to):
        if rank.step == "called":
            return
        if rank.has != NOTHING:
            to("user frees", rank=rank._replace(has=NOTHING))
        elif rank.made < self.allocations:
            taken = [place for _, place in rank.keeps]
            for place in (p for p in (0, 1) if p not in taken):
                to("user allocates", rank=rank._replace(has=(rank.made + 1, place), made=rank.made + 1))

    def _rank(self, rank, leader, said, broken, to):
        if rank.step == "idle":
            if broken or not rank.calls:
                to("rank closes", rank=rank._replace(step="closing"))
            elif rank.has != NOTHING:
                freed = tuple(a for a in rank.told if a != rank.has)
                told = tuple(dict.fromkeys((*(a for a in rank.told if a not in freed), rank.has)))
                to(
                    "rank tells",
                    rank=rank._replace(step="called", keeps=(rank.has,), told=told),
                    words=(rank.has, freed if self.tells_freed else ()),
                )
            else:
                to("rank gives up", rank=rank._replace(step="closing"), broken=True)
        elif rank.step == "called":
            if said or not self.waits:
                done = rank._replace(step="idle", keeps=(), calls=rank.calls - 1)
                to("rank goes on", rank=done, words=None if said else (rank.has, ()), said=False)
            failed = rank._replace(step="failed", keeps=rank.keeps if self.keeps_failed else ())
            to("rank fails", rank=failed, broken=True)
        elif rank.step == "failed":
            to("rank closes", rank=rank._replace(step="closing"))
        elif rank.step == "closing":
            if leader.mark or leader.step == "dead":
                to("rank sees the mark", rank=rank._replace(step="over", keeps=()))
            to("rank waits no more", rank=rank._replace(step="over"), broken=True)

    def _leader(self, rank, leader, words, broken, to):
        if leader.kernel != NOTHING:
            to("kernel ends", leader=leader._replace(kernel=NOTHING))
        if leader.step == "waiting":
            if broken or rank.step in ("closing", "over"):
                to("leader closes", leader=leader._replace(step="failed"))
            elif words is not None and rank.step == "called":
                to("leader opens", leader=self._opened(leader, words))
        elif leader.step == "kernel":
            if leader.kernel == NOTHING:
                to("leader says", leader=leader._replace(step="waiting"), words=None, said=True)
            to("leader fails", leader=leader._replace(step="failed"), broken=True)
        elif leader.step == "failed":
            if leader.kernel == NOTHING or not self.idle_first:
                kept = leader.open if not self.closes_at_end else ()
                to("leader marks", leader=leader._replace(step="over", open=kept, mark=True))
            else:
                to("leader keeps all", leader=leader._replace(step="over"))

    def _opened(self, leader, words):
        told, freed = words
        key = (lambda a: a[1]) if self.by_place else (lambda a: a)
        is_open = [(t, shows) for t, shows in leader.open if t not in freed]
        mine = next((m for m in is_open if key(m[0]) == key(told)), None)
        if mine is None:
            if self.closes_stale:
                is_open = [m for m in is_open if m[0][1] != told[1]]
            is_open = is_open[max(0, len(is_open) - self.most + 1) :]
            shows = next((s for _, s in is_open if s[1] == told[1]), told)
            mine = told, shows
        else:
            is_open.remove(mine)
            mine = told, mine[1]
        return leader._replace(step="kernel", open=(*is_open, mine), kernel=mine[1])
