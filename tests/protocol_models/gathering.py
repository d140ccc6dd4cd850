"""How all_to_all's ranks wait for all to come while they fill each other's pair rings (backend/shm/all_to_all.cpp), as
one of them sees it, the reader. One step per access to shared memory; a ring of the doorbell, which doorbell.py looks
into, is two.

Every writer announces its call, and rings if all have announced theirs by then; it writes, and rings if all have by
then. The reader takes nothing before all have, and sleeps whenever there is nothing for it to do. No sleep may need its
look every 10 ms. Nobody dies here: of that the reader is told by those looks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatheringModel:
    pieces: tuple  # of each writer
    # Mutations:
    rings_if_last: bool = True
    write_first: bool = True  # a writer looks who is here after it has written

    # State: (sleeping, rings, the reader's step, rings as it saw them, writers). A writer: (step, pieces written, whose
    # announcement it looks for). The reader has announced its call at the start, or what it misses it finds when it
    # looks.

    def initial(self):
        return 0, 0, "look", 0, (("announce", 0, 0),) * len(self.pieces)

    def over(self, state):
        return state[2] == "end" and all(w[0] == "over" for w in state[4])

    def wrong(self, state):
        return None

    def steps(self, state):
        return [*self._reader(*state), *(s for i in range(len(self.pieces)) for s in self._writer(i, *state))]

    def _writer(self, i, sleeping, rings, step, seen, writers):
        mine, written, whom = writers[i]

        def to(mine, written=written, whom=0, sleeping=sleeping, rings=rings, step=step):
            return sleeping, rings, step, seen, (*writers[:i], (mine, written, whom), *writers[i + 1 :])

        on = "write" if self.write_first else "scan for the next"
        more = on if written < self.pieces[i] else "over"
        if mine == "announce":
            yield f"writer {i} announces", to("scan" if self.rings_if_last else more)
        elif mine == "write":
            after = "scan" if self.write_first else "scan for the next" if written + 1 < self.pieces[i] else "over"
            yield f"writer {i} writes", to(after, written + 1)
        elif mine in ("scan", "scan for the next"):
            then, rung = ("peek", more) if mine == "scan" else ("peek for the next", "write")
            if whom == len(writers):
                yield f"writer {i} finds all here", to(then)
            elif writers[whom][0] == "announce":
                yield f"writer {i} finds {whom} missing", to(rung)
            else:
                yield f"writer {i} finds {whom} here", to(mine, whom=whom + 1)
        elif mine in ("peek", "peek for the next"):
            rung = more if mine == "peek" else "write"
            yield f"writer {i} looks whether to ring", to(("ring" + mine[4:]) if sleeping else rung)
        elif mine in ("ring", "ring for the next"):
            rung = more if mine == "ring" else "write"
            yield (
                f"writer {i} rings",
                to(rung, sleeping=0, rings=rings + 1, step="look" if step == "asleep" else step)
                if sleeping
                else to(rung),
            )

    def _reader(self, sleeping, rings, step, seen, writers):
        def to(step, sleeping=sleeping, seen=seen):
            return sleeping, rings, step, seen, writers

        here = all(w[0] != "announce" for w in writers)
        all_read = here and tuple(w[1] for w in writers) == self.pieces
        if step == "look":
            yield "reader looks", to("end" if all_read else "rings")
        elif step == "rings":
            yield "reader reads rings", to("say", seen=rings)
        elif step == "say":
            yield "reader says that it sleeps", to("check", sleeping=1)
        elif step == "check":
            # It may also find a part of it, and look again: a sleep that it need not take is left out here.
            yield "reader sleeps unless all is there", to("asleep" if rings == seen and not all_read else "awake")
        elif step == "awake":
            yield "reader says that it does not sleep", to("look", sleeping=0)
