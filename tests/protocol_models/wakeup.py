"""Group::advance and Group::wait (backend/shm/group.cpp) on one Signal, one step per access to shared memory.

The owner takes `value` from 0 to `last`. Each waiter makes its waits, (need, worth) pairs, one after the other. What
the code does every 10 ms, that is, look again whether all is well, is left out: a wait must not need it to end unless
the owner has died. The owner may die between any two steps; its death is what a sleeper may wake for.

Steps are sequentially consistent, as the code asks for it (memory_order_seq_cst) wherever it matters.
"""

from dataclasses import dataclass

NEVER = 99


@dataclass(frozen=True)
class Wakeup:
    last: int
    waits: tuple  # of each waiter: ((need, worth), ...)
    dies: bool = True
    # Mutations:
    recheck: bool = True  # the value is read after asking to be woken
    wakes: bool = True  # the owner wakes whom it finds asking
    counts: bool = True  # the owner counts its wake-ups
    sleep_on: str = "wakes"  # the word that the kernel compares
    store_first: bool = True  # the owner stores the value before it looks for sleepers

    # State: (value, wake_at, wakes, owner, waiters). owner: (step, value it is about to publish), step "dead" or
    # "over". A waiter: (number of the wait, step, the word it will sleep on as it was).

    def initial(self):
        return 0, NEVER, 0, ("store" if self.store_first else "look", 1), tuple((0, "try", 0) for _ in self.waits)

    def over(self, state):
        return state[3][0] in ("over", "dead") and all(w[1] in ("end", "lost") for w in state[4])

    def wrong(self, state):
        for i, (_, step, _) in enumerate(state[4]):
            if step == "lost" and state[3][0] != "dead":
                return f"waiter {i} took a living owner for lost"
        return None

    def steps(self, state):
        return [*self._owner(*state), *(s for i in range(len(self.waits)) for s in self._waiter(i, *state))]

    def _owner(self, value, wake_at, wakes, owner, waiters):
        step, new = owner
        if step in ("over", "dead"):
            return
        first, second = ("store", "look") if self.store_first else ("look", "store")
        after = {second: (first, new + 1) if new < self.last else ("over", 0), first: (second, new)}
        if step == "store":
            yield f"owner stores {new}", (new, wake_at, wakes, after["store"], waiters)
        elif step == "look":
            follow = ("clear", new) if wake_at <= new and self.wakes else after["look"]
            yield f"owner finds wake_at {wake_at}", (value, wake_at, wakes, follow, waiters)
        elif step == "clear":
            yield "owner clears wake_at", (value, NEVER, wakes, ("count" if self.counts else "wake", new), waiters)
        elif step == "count":
            yield "owner counts the wake-up", (value, wake_at, wakes + 1, ("wake", new), waiters)
        elif step == "wake":
            woken = tuple((w[0], "again", 0) if w[1] == "asleep" else w for w in waiters)
            yield "owner wakes", (value, wake_at, wakes, after["look"], woken)
        if self.dies:
            yield "owner dies", (value, wake_at, wakes, ("dead", 0), waiters)

    def _waiter(self, i, value, wake_at, wakes, owner, waiters):
        number, step, seen = waiters[i]
        if step in ("end", "lost"):
            return
        need, worth = self.waits[i][number]
        word = {"value": value, "wake_at": wake_at, "wakes": wakes}[self.sleep_on]

        def to(*mine, wake_at=wake_at):
            return value, wake_at, wakes, owner, (*waiters[:i], mine, *waiters[i + 1 :])

        done = (number + 1, "try", 0) if number + 1 < len(self.waits[i]) else (number, "end", 0)
        if step in ("try", "again"):
            yield f"waiter {i} reads value {value}", to(*done) if value >= need else to(number, "count", 0)
        elif step == "count":
            yield f"waiter {i} reads wakes {wakes}", to(number, "ask", word)
        elif step == "ask":  # the compare-and-swap to the smaller one
            asked = min(wake_at, worth)
            yield (
                f"waiter {i} asks for {worth}",
                to(number, "check", asked if self.sleep_on == "wake_at" else seen, wake_at=asked),
            )
        elif step == "check":
            enough = self.recheck and value >= need
            yield (
                f"waiter {i} reads value {value}",
                to(*done) if enough else to(number, "sleep", value if self.sleep_on == "value" else seen),
            )
        elif step == "sleep":  # the kernel compares and sleeps in one step
            yield f"waiter {i} sleeps unless woken", to(number, "asleep" if word == seen else "again", 0)
        elif step == "asleep" and owner[0] == "dead":
            yield f"waiter {i} notices", to(*done) if value >= need else to(number, "lost", 0)
