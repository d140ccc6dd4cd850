"""Put, signal and wait (backend/shm/window.h) on a machine that reorders memory accesses, as aarch64 does. One rank
puts the number of the round into the other's memory and signals; the other waits, reads, and signals back; then the
first one may put again. Each access to memory is a step, and comes in any order that the three rules leave:

- `release`: a rank's signal is seen only after what it has put before;
- `acquire`: what it reads after a wait is read after the signal was seen;
- `reads_first`: a rank's signal is seen only after it has read what it read before.

The core's are a store (seq_cst, so a release, which has the first and the third) and a load (acquire) of Signal::value:
stlr and ldar or ldapr on aarch64; on x86-64 any store and load. A put that follows a wait needs no rule of its own: no
processor shows others a store that it may have to take back. Wake-ups: wakeup.py."""

from dataclasses import dataclass

NOTHING = -1


@dataclass(frozen=True)
class PutSignal:
    rounds: int
    release: bool = True
    acquire: bool = True
    reads_first: bool = True

    # State: (data, signals to the reader, signals to the writer, writer, reader). The writer: (step, round, stores that
    # nobody sees yet, in its order). The reader: (step, round, what it has read too early, what it has read).

    def initial(self):
        return 0, 0, 0, ("put", 1, ()), ("wait", 1, NOTHING, NOTHING)

    def over(self, state):
        return state[3][0] == "over" and state[4][0] == "over"

    def wrong(self, state):
        _, round_, _, got = state[4]
        return f"round {round_} has read {got}" if got not in (NOTHING, round_) else None

    def steps(self, state):
        return [*self._writer(*state), *self._reader(*state)]

    def _writer(self, data, there, back, writer, reader):
        step, round_, unseen = writer
        for i, (what, value) in enumerate(unseen):
            before = unseen[:i]
            if any(w == what for w, _ in before) or (self.release and what == "signal" and before):
                continue
            left = step, round_, before + unseen[i + 1 :]
            if what == "data":
                yield f"{value} is seen", (value, there, back, left, reader)
            else:
                yield f"signal {value} is seen", (data, value, back, left, reader)
        if step == "put":
            yield "puts", (data, there, back, ("signal", round_, (*unseen, ("data", round_))), reader)
        elif step == "signal":
            yield "signals", (data, there, back, ("wait", round_, (*unseen, ("signal", round_))), reader)
        elif step == "wait" and back >= round_:
            after = ("put", round_ + 1) if round_ < self.rounds else ("over", round_)
            yield "may put again", (data, there, back, (*after, unseen), reader)

    def _reader(self, data, there, back, writer, reader):
        step, round_, early, _ = reader

        def to(*mine, back=back):
            return data, there, back, writer, mine

        after = ("wait", round_ + 1) if round_ < self.rounds else ("over", round_)
        if step == "wait":
            if not self.acquire and early == NOTHING:
                yield "reads too early", to("wait", round_, data, NOTHING)
            if there >= round_:
                yield "has waited", to("read", round_, early, NOTHING)
        elif step == "read":
            yield "reads", to("signal", round_, NOTHING, data if early == NOTHING else early)
            if not self.reads_first:
                yield "signals before it has read", to("late", round_, early, NOTHING, back=round_)
        elif step == "late":
            yield "reads late", to("read late", round_, NOTHING, data if early == NOTHING else early)
        elif step == "read late":
            yield "goes on", to(*after, NOTHING, NOTHING)
        elif step == "signal":
            yield "signals back", to(*after, NOTHING, NOTHING, back=round_)
