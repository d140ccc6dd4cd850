"""Doorbell, Group::wake (backend/shm/group.cpp) and who sleeps on one: all_to_all's pair rings and the messages of
p2p.cpp. One step per access to shared memory.

Each waker publishes what it has, one piece after the other, and wakes the owner after each. The owner takes all it
finds, and sleeps when it finds nothing, until it has everything. As in wakeup.py it must not need its look every 10 ms;
any waker may die between two steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DoorbellModel:
    pieces: tuple  # of each waker
    dies: bool = True
    # Mutations:
    rings_first: bool = True  # the owner reads `rings` before it says that it sleeps
    recheck: bool = True  # it looks again after that
    counts: bool = True  # a waker counts before it wakes
    publish_first: bool = True

    # State: (sleeping, rings, taken by the owner of each waker, its step, rings as it saw them, wakers). A waker:
    # (step, pieces published).

    def initial(self):
        return 0, 0, (0,) * len(self.pieces), "look", 0, (("next", 0),) * len(self.pieces)

    def over(self, state):
        return state[3] in ("end", "lost") and all(w[0] in ("over", "dead") for w in state[5])

    def wrong(self, state):
        if state[3] == "lost" and all(w[0] != "dead" for w in state[5]):
            return "the owner took a living waker for lost"
        return None

    def steps(self, state):
        return [*self._owner(*state), *(s for i in range(len(self.pieces)) for s in self._waker(i, *state))]

    def _waker(self, i, sleeping, rings, taken, step, seen, wakers):
        mine, published = wakers[i]
        if mine in ("over", "dead"):
            return

        def to(mine, published=published, sleeping=sleeping, rings=rings, step=step):
            return sleeping, rings, taken, step, seen, (*wakers[:i], (mine, published), *wakers[i + 1 :])

        first, second = ("publish", "peek") if self.publish_first else ("peek", "publish")
        after = {first: second, second: "next"}
        if mine == "next":
            yield f"waker {i} goes on", to(first if published < self.pieces[i] else "over")
        elif mine == "publish":
            yield f"waker {i} publishes", to(after["publish"], published + 1)
        elif mine == "peek":
            yield f"waker {i} reads sleeping", to("clear" if sleeping else after["peek"])
        elif mine == "clear":
            yield (
                f"waker {i} clears sleeping",
                to(("count" if self.counts else "wake") if sleeping else after["peek"], sleeping=0),
            )
        elif mine == "count":
            yield f"waker {i} counts", to("wake", rings=rings + 1)
        elif mine == "wake":
            yield f"waker {i} wakes", to(after["peek"], step="look" if step == "asleep" else step)
        if self.dies:
            yield f"waker {i} dies", to("dead")

    def _owner(self, sleeping, rings, taken, step, seen, wakers):
        there = tuple(w[1] for w in wakers)

        def to(step, sleeping=sleeping, taken=taken, seen=seen):
            return sleeping, rings, taken, step, seen, wakers

        ask = ("rings", "say", "check") if self.rings_first else ("say", "rings", "check")
        if step == "look":
            if there == self.pieces:
                yield "owner has everything", to("end", taken=there)
            else:
                yield "owner looks", to("look" if there != taken else ask[0], taken=there)
        elif step == "rings":
            yield "owner reads rings", to(ask[ask.index("rings") + 1], seen=rings)
        elif step == "say":
            yield "owner says that it sleeps", to(ask[ask.index("say") + 1], sleeping=1)
        elif step == "check":
            if self.recheck and there != taken:
                yield "owner finds something", to("forget")
            else:
                yield "owner sleeps unless woken", to("asleep" if rings == seen else "forget")
        elif step == "forget":
            yield "owner says that it does not sleep", to("look", sleeping=0)
        elif step == "asleep" and any(w[0] == "dead" for w in wakers):
            yield "owner notices", to("lost" if there == taken else "forget")
