"""How many ranks learn that all have come, and whether their calls are alike (backend/shm/combining_tree.h). One step
per access to shared memory; what a rank announces is written before it comes, in the same step as that.

A rank that all have come is told in one word, which says whether any raised a flag, or two of them differ: then, and
only then. Wake-ups are those of any signal (wakeup.py)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeModel:
    rounds: tuple  # of each round, what each rank says; None: it raises a flag
    fan_in: int
    # Mutations:
    waits: bool = True  # a rank comes to a round when all have come to the one before
    compares: bool = True  # who makes a counter full compares
    forgets: bool = True  # the flags of earlier rounds

    # State: (word, counters, ranks). The word: (round, flag). A counter: (times come, flags, flags before). A rank:
    # (step, round, level, whether it has seen a flag, branches that it has compared).

    def __post_init__(self):
        levels, width = [], len(self.rounds[0])
        while width > 1:
            levels.append((sum(n for n, _ in levels), width))
            width = -(-width // self.fan_in)
            levels[-1] = width, levels[-1][1]
        object.__setattr__(self, "levels", tuple(levels))  # (counters, branches) of each

    def initial(self):
        counters = ((0, 0, 0),) * sum(counters for counters, _ in self.levels)
        return (0, False), counters, (("come", 1, 0, False, 0),) * len(self.rounds[0])

    def over(self, state):
        return state[0][0] == len(self.rounds) and all(rank[0] == "over" for rank in state[2])

    def wrong(self, state):
        (round_, flag), _, ranks = state
        if not round_:
            return None
        if any(rank[0] == "come" and not rank[2] and rank[1] <= round_ for rank in ranks):
            return "all are said to have come, and one has not"
        said = self.rounds[round_ - 1]
        return None if flag == (None in said or len(set(said)) > 1) else f"round {round_}: flag is {flag}"

    def steps(self, state):
        return [step for r in range(len(state[2])) for step in self._rank(r, *state)]

    def _rank(self, r, word, counters, ranks):
        step, round_, level, flag, compared = ranks[r]

        def to(*mine, word=word, counter=None):
            changed = counters if counter is None else (*counters[:at], counter, *counters[at + 1 :])
            return word, changed, (*ranks[:r], mine, *ranks[r + 1 :])

        if step == "wait":
            if word[0] >= round_ or not self.waits:
                last = round_ == len(self.rounds)
                yield f"{r} goes on", to("over", round_, 0, False, 0) if last else to("come", round_ + 1, 0, False, 0)
            return
        if step == "over":
            return
        stride, width = self.fan_in**level, self.levels[level][1]
        index = r // stride
        first = index // self.fan_in * self.fan_in
        branches = range(first, min(first + self.fan_in, width))
        at = sum(n for n, _ in self.levels[:level]) + index // self.fan_in
        come, flags, before = counters[at]
        if step == "come":
            flag = flag or self.rounds[round_ - 1][r] is None
            full = come + 1 == round_ * len(branches)
            mine = ("compare", round_, level, flag, 0) if full else ("wait", round_, 0, False, 0)
            yield f"{r} comes to level {level}", to(*mine, counter=(come + 1, flags + flag, before))
        elif step == "compare":
            if flag or not self.compares or compared == len(branches):
                yield f"{r} has compared", to("flags", round_, level, flag, 0)
            else:
                theirs = self.rounds[round_ - 1][branches[compared] * stride]
                differs = theirs != self.rounds[round_ - 1][r]
                yield f"{r} compares", to("compare", round_, level, differs, compared + 1)
        elif step == "flags":
            flag = flag or flags != (before if self.forgets else 0)
            top = level + 1 == len(self.levels)
            mine = ("tell", round_, level, flag, 0) if top else ("come", round_, level + 1, flag, 0)
            yield f"{r} reads the flags", to(*mine, counter=(come, flags, flags))
        elif step == "tell":
            yield f"{r} tells all", to("wait", round_, 0, False, 0, word=(round_, flag))
