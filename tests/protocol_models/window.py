"""pipeline() of backend/shm/pipeline.h: blocks through the slots of a ring of `window`, on 2 or 3 ranks. The steps of a
rank are those of the code, in its order; each piece of data is touched over a stretch of time (begin, end), at both
ends of which the slots must hold what the code takes to be in them.

A wait is one step here, for wakeup.py shows that it ends once the value is worth it. It does not end before that: so
this model also says whether asking for more than the next block can deadlock. Any one rank may die between two steps;
the others must then end, by noticing it or each other's failure."""

from dataclasses import dataclass

FILL, REDUCE, DRAIN = "fill", "reduce", "drain"
# Where the loop is, and whether it has moved anything in this turn.
AT_REDUCE, AT_REDUCE_MOVED = ("at", REDUCE, False), ("at", REDUCE, True)
AT_DRAIN_MOVED, AT_FILL_MOVED = ("at", DRAIN, True), ("at", FILL, True)


@dataclass(frozen=True)
class Window:
    ranks: int
    window: int
    blocks: int
    reduces: bool
    drains: tuple = ()  # which ranks drain; none given: all
    fills: tuple = ()
    dies: bool = True
    # Mutations:
    slack: int = 0  # how many blocks too far ahead a rank may fill
    own: bool = True  # a rank waits for its own stages, too, before it fills a slot again
    greedy: bool = False  # asks to be woken for a whole batch, whatever the others can finish by themselves
    early_out: bool = False  # says that it has drained before it has
    notices: bool = True  # a sleeper notices that its peer has died, or that the group has failed

    # State of a rank: (filled, reduced, drained, in, red, out, step). step: ("at", ...), a stage under way, ("wait",
    # signal, peer, need, worth), "over", "failed" or "dead". The signals in, red, out are what it has published.

    def initial(self):
        return tuple((*self._start(r), AT_FILL_MOVED) for r in range(self.ranks))

    def _start(self, r):
        filled = 0 if self._fills(r) else self.blocks
        drained = 0 if self._drains(r) else self.blocks
        out = self.blocks if not self._drains(r) and not self.reduces else 0
        return filled, 0, drained, filled, 0, out

    def _fills(self, r):
        return not self.fills or r in self.fills

    def _drains(self, r):
        return not self.drains or r in self.drains

    def over(self, state):
        return all(rank[6] in ("over", "failed", "dead") for rank in state)

    def wrong(self, state):
        lost = any(rank[6] in ("failed", "dead") for rank in state)
        for r, (filled, reduced, drained, *_, step) in enumerate(state):
            if step == "failed" and not any(rank[6] == "dead" for rank in state):
                return f"rank {r} failed though nobody died"
            if step == "over" and (filled, drained) != (self.blocks, self.blocks) and not lost:
                return f"rank {r} ended early"
            if step in (REDUCE, DRAIN) and (bad := self._unready(state, r, step)):
                return bad
        return None

    def _unready(self, state, r, stage):
        """While rank r reduces or drains its next block: does every slot it reads hold that block, as far as it
        must?"""
        k = state[r][1] if stage == REDUCE else state[r][2]
        for p, (filled, reduced, *_, step) in enumerate(state):
            if not self._fills(p) or (p == r and stage == DRAIN):
                continue
            newest = filled + (step == FILL)  # a slot that is being filled holds the new block, not the old
            if newest - 1 >= k + self.window:
                return f"rank {p} reuses the slot of block {k} while rank {r} is in its {stage}"
            if p == r:
                continue
            if filled <= k:
                return f"rank {r} reads block {k} of rank {p}, which has not filled it"
            if stage == DRAIN and self.reduces and reduced <= k:
                return f"rank {r} reads its part of block {k} of rank {p}, which has not reduced it"
        return None

    def steps(self, state):
        out = []
        for r, rank in enumerate(state):
            if rank[6] in ("over", "failed", "dead"):
                continue
            out += [(f"rank {r} {name}", self._with(state, r, new)) for name, new in self._step(state, r)]
            if self.dies and not any(other[6] == "dead" for other in state):
                out.append((f"rank {r} dies", self._with(state, r, (*rank[:6], "dead"))))
        return out

    @staticmethod
    def _with(state, r, rank):
        return (*state[:r], rank, *state[r + 1 :])

    def _slowest(self, state, r, signal):
        return min((rank[signal], p) for p, rank in enumerate(state) if p != r)

    def _may_fill(self, state, r):
        filled, reduced, drained = state[r][:3]
        if filled >= self.blocks:
            return False
        done = min(reduced, drained) if self.reduces else drained
        window = self.window + self.slack
        if self.own and filled >= done + window:
            return False
        return filled < window or self._slowest(state, r, 5)[0] >= filled + 1 - window

    def _step(self, state, r):
        filled, reduced, drained, in_, red, out, step = state[r]
        if step == FILL:
            yield "has filled", (filled + 1, reduced, drained, filled + 1, red, out, AT_FILL_MOVED)
        elif step == REDUCE:
            quiet = reduced + 1 if not self._drains(r) else out
            yield "has reduced", (filled, reduced + 1, drained, in_, reduced + 1, quiet, AT_REDUCE_MOVED)
        elif step == DRAIN:
            yield "has drained", (filled, reduced, drained + 1, in_, red, max(out, drained + 1), AT_DRAIN_MOVED)
        elif step[0] == "wait":
            yield from self._waiting(state, r)
        else:
            yield self._next(state, r)

    def _next(self, state, r):
        """One look at the others' signals, where the loop of the code is: at the stage of `place`."""
        filled, reduced, drained, in_, red, out, (_, place, moved) = state[r]

        def at(step, out=out):
            return filled, reduced, drained, in_, red, out, step

        if place == REDUCE:
            if self.reduces and reduced < filled and self._slowest(state, r, 3)[0] >= reduced + 1:
                return "reduces", at(REDUCE)
            return "has nothing to reduce", at(("at", DRAIN, moved))
        if place == DRAIN:
            ready = reduced if self.reduces else min(filled, self._slowest(state, r, 3)[0])
            if drained < ready and (not self.reduces or self._slowest(state, r, 4)[0] >= drained + 1):
                return "drains", at(DRAIN, drained + 1 if self.early_out else out)
            return "has nothing to drain", at(("at", FILL, moved))
        if place == FILL:
            if self._may_fill(state, r):
                return "fills", at(FILL)
            return "has nothing to fill", at(("at", "end", moved))
        if filled == self.blocks and drained == self.blocks and (not self.reduces or reduced == self.blocks):
            return "is through", at("over")
        if moved:
            return "goes on", at(AT_REDUCE)
        batch = self.window // 2
        ready = reduced if self.reduces else drained

        def worth(need, most):
            return max(need, min(self.blocks, need + self.window) if self.greedy else most)

        if self.reduces and self._drains(r) and drained < reduced:
            who = self._slowest(state, r, 4)[1]
            wait = "wait", 4, who, drained + 1, worth(drained + 1, min(reduced, drained + batch))
        elif ready < filled:
            who = self._slowest(state, r, 3)[1]
            wait = "wait", 3, who, ready + 1, worth(ready + 1, min(filled, ready + batch))
        else:
            who = self._slowest(state, r, 5)[1]
            wait = "wait", 5, who, filled + 1 - self.window, filled + batch - self.window
        return f"waits for rank {who}", at(wait)

    def _waiting(self, state, r):
        *counts, (_, signal, peer, need, worth) = state[r]
        value = state[peer][signal]
        if value >= worth:
            yield "wakes", (*counts, AT_REDUCE)
        elif value >= need:
            yield from ()  # it may look by itself; nobody may rely on it
        if self.notices and value < need and (state[peer][6] == "dead" or any(rank[6] == "failed" for rank in state)):
            yield "gives up", (*counts, "failed")
        if self.notices and value >= need and state[peer][6] == "dead":
            yield "wakes", (*counts, AT_REDUCE)
