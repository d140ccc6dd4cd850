"""The report that ``python -m c10d_custom trace`` prints, of what the files of all ranks say together: where each rank
stands in each group, who waits for whom, and who holds up the rest.

A rank stands at the last collective of a group that it has begun: inside it, if that has not ended or has failed, else
past it. Inside collective #k it waits for every rank that has not entered #k. A rank without a file stands where the
others' files say that they saw it. Ranks below are global unless said otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..transport.call_log import UNDER_WAY

if TYPE_CHECKING:
    from ..transport.call_log import Peer, Record
    from .file import Dump, GroupTrace


SEEN = {"gone": "its process is gone", "left": "it has left the group", "absent": "never joined"}  # of a Peer's states


@dataclass(frozen=True)
class Wait:
    """Rank ``rank`` waits for ``other``; ``why`` says in what."""

    rank: int
    other: int
    why: str


def latest(dumps: Iterable[Dump]) -> dict[int, Dump]:
    """{rank: its last file}"""
    newest = {}
    for d in sorted(dumps, key=lambda d: d.written):
        newest[d.rank] = d
    return newest


def inside(record: Record) -> bool:
    """Returns whether a rank whose last collective this is has got stuck in it."""
    return record.state != "done"


class GroupStanding:
    """What all files together say of one group."""

    def __init__(self, name: str, members: list[int]) -> None:
        self.name, self.members = name, members
        self.views: dict[int, GroupTrace] = {}  # by group rank
        self.seen: dict[int, Peer] = {}  # group rank -> the Peer that tells most of it

    def add(self, trace: GroupTrace) -> None:
        self.views[trace.rank] = trace
        for peer in trace.peers:
            best = self.seen.get(peer.rank)
            if best is None or (peer.entered or 0, peer.state == "gone") > (best.entered or 0, best.state == "gone"):
                self.seen[peer.rank] = peer

    def last(self, rank: int) -> Record | None:
        """Its last collective that has begun; None if there is none, or no file."""
        begun = [c for c in self._calls(rank) if not c.is_message and c.state != "queued"]
        return max(begun, key=lambda c: c.number, default=None)

    def entered(self, rank: int) -> int | None:
        """The number of the last collective it has begun; None where nobody knows."""
        if rank in self.views:
            last = self.last(rank)
            return last.number if last else 0
        return self.seen[rank].entered if rank in self.seen else None

    def messages(self, rank: int) -> list[Record]:
        return [
            c for c in self._calls(rank) if c.is_message and c.state in UNDER_WAY + ("timed_out", "peer_lost", "broken")
        ]

    def _calls(self, rank: int) -> list[Record]:
        return self.views[rank].calls if rank in self.views else []

    def late(self, rank: int, call: Record) -> list[int]:
        """The ranks that have not entered this collective of ``rank``'s, as far as is known."""
        return [r for r in range(len(self.members)) if r != rank and (self.entered(r) or 0) < call.number]

    def waits(self) -> Iterator[Wait]:
        for rank in self.views:
            last = self.last(rank)
            if last is not None and inside(last):
                yield from self._collective_waits(rank, last)
            for message in self.messages(rank):
                yield from self._message_waits(rank, message)

    def _collective_waits(self, rank: int, call: Record) -> Iterator[Wait]:
        where = f"{call.operation} #{call.number} of group {self.name or '(unnamed)'}"
        late = self.late(rank, call)
        for r in late:
            yield Wait(self.members[rank], self.members[r], f"{where}, which it has not entered")
        if late or call.state == "mismatch":
            return
        for r, member in enumerate(self.members):
            if r not in self.views:
                yield Wait(self.members[rank], member, f"{where}, which it has entered")

    def _message_waits(self, rank: int, message: Record) -> Iterator[Wait]:
        where = message.asked().replace(f"rank {message.peer}", f"rank {self._global(message.peer)}")
        where += f" in group {self.name or '(unnamed)'}"
        if message.peer >= 0 and message.peer != rank and not self._answered(rank, message):
            yield Wait(self.members[rank], self._global(message.peer), where)

    def _global(self, rank: int) -> int:
        return self.members[rank] if 0 <= rank < len(self.members) else rank

    def _answered(self, rank: int, message: Record) -> bool:
        """Whether the other side has posted its half: then both are in it, and neither is waited for."""
        other = "recv" if message.operation == "send" else "send"
        return any(
            m.operation == other and m.tag == message.tag and m.peer in (rank, -1) for m in self.messages(message.peer)
        )


def standings(newest: dict[int, Dump]) -> list[GroupStanding]:
    groups: dict[tuple[str, tuple[int, ...]], GroupStanding] = {}
    for dump in newest.values():
        for trace in dump.groups:
            key = trace.name, tuple(trace.members)
            groups.setdefault(key, GroupStanding(trace.name, trace.members)).add(trace)
    return list(groups.values())


def ranks_in_words(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ago(then: float, now: float) -> str:
    return f"{max(0.0, now - then):.3f} s"


def _describe_group(group: GroupStanding, newest: dict[int, Dump]) -> list[str]:
    """Lines: which ranks stand where, ranks at the same place together."""
    locations = defaultdict(list)
    for r, member in enumerate(group.members):
        last = group.last(r)
        if r not in group.views:
            seen = group.seen.get(r)
            said = (
                "; seen by the others: "
                + ", ".join(
                    [f"pid {seen.pid}", SEEN.get(seen.state, seen.state)]
                    + ([f"entered {seen.entered} collectives"] if seen.entered is not None else [])
                    + ([f"the last was {seen.calling}"] if seen.calling != "-" else [])
                )
                if seen
                else ""
            )
            place = (
                f"no file{said}"
                if member not in newest
                else f"not in its file (destroyed there, or not yet made){said}"
            )
        elif last is None:
            place = "has begun no collective"
        elif inside(last):
            place = f"inside #{last.number}: {last.asked()}"
        else:
            place = f"past #{last.number}: {last.asked()}"
        locations[place].append(member)
    lines = [f"group {group.name or '(unnamed)'}, {ranks_in_words(group.members)}"]
    lines += [f"  {ranks_in_words(members)}: {place}" for place, members in locations.items()]
    for r, member in enumerate(group.members):
        for m in group.messages(r):
            lines.append(
                f"  rank {member}: {m.asked()} (group's ranks), {m.state.replace('_', ' ')}, called "
                f"{_ago(m.issued, newest[member].written)} before its file was written"
            )
    return lines


def _describe_rank(rank: int, dump: Dump) -> str:
    text = f"rank {rank} (pid {dump.pid} on {dump.host}): "
    under_way = []
    last: tuple[Record, GroupTrace, float] | None = None  # and when it ended
    for g in dump.groups:
        for c in g.calls:
            if c.state == "running" or c.state == "waiting":
                number = f" #{c.number}" if not c.is_message else ""
                under_way.append(
                    f"{c.operation}{number} of group {g.name or '(unnamed)'} for {_ago(c.issued, dump.written)}"
                )
            elif c.ended is not None and (last is None or c.ended > last[2]):
                last = c, g, c.ended
    if under_way:
        text += "in " + "; ".join(under_way)
    elif last is not None:
        c, g, ended = last
        text += (
            f"in no call; the last, {c.operation}{'' if c.is_message else f' #{c.number}'} of group "
            f"{g.name or '(unnamed)'}, ended {c.state.replace('_', ' ')} {_ago(ended, dump.written)} before"
        )
    else:
        text += "has made no call"
    return f"{text}. Written on: {dump.reason}"


def circles(waits: Iterable[Wait]) -> list[tuple[int, ...]]:
    """Circles of ranks that wait for each other, each once, beginning with its lowest rank."""
    after = defaultdict(set)
    for w in waits:
        after[w.rank].add(w.other)
    found = set()

    def walk(path: list[int]) -> None:
        for other in sorted(after[path[-1]]):
            if other == path[0]:
                found.add(tuple(path))
            elif other > path[0] and other not in path and len(path) < 16:
                walk([*path, other])

    for rank in sorted(after):
        if len(found) < 20:
            walk([rank])
    shortest = sorted(found, key=lambda c: (len(c), c))
    return [c for i, c in enumerate(shortest) if not any(set(d) < set(c) for d in shortest[:i])]


def in_words(circle: Sequence[int]) -> str:
    return " waits for ".join(f"rank {r}" for r in (*circle, circle[0]))


def holders(waits: Sequence[Wait]) -> dict[int, set[int]]:
    """{rank that waits for nobody: ranks that wait for it, directly or through others}"""
    waiting = {w.rank for w in waits}
    after = defaultdict(set)
    for w in waits:
        after[w.other].add(w.rank)
    found = {}
    for rank in sorted({w.other for w in waits} - waiting):
        behind: set[int] = set()
        todo = [rank]
        while todo:
            for r in after[todo.pop()] - behind:
                behind.add(r)
                todo.append(r)
        found[rank] = behind
    return found


def report(dumps: Iterable[Dump]) -> list[str]:
    """Returns the report as lines for a person to read."""
    newest = latest(dumps)
    groups = standings(newest)
    lines = [_describe_rank(rank, dump) for rank, dump in sorted(newest.items())]
    everyone = {m for g in groups for m in g.members}
    if missing := everyone - newest.keys():
        lines.append(f"no file of {ranks_in_words(missing)}: died, did not fail, or writes elsewhere")
    for group in groups:
        lines += ["", *_describe_group(group, newest)]
        disagreement: dict[int, dict[str, list[int]]] = {}
        for r in sorted(group.views):
            last = group.last(r)
            if last is not None and inside(last):
                disagreement.setdefault(last.number, defaultdict(list))[last.asked()].append(group.members[r])
        for number, asked in disagreement.items():
            if len(asked) > 1:
                lines.append(
                    f"  #{number} was not called alike: "
                    + "; ".join(f"{ranks_in_words(m)}: {a}" for a, m in asked.items())
                )
    waits = [w for g in groups for w in g.waits()]
    lines += ["", "who waits for whom:"]
    together = defaultdict(list)
    for w in waits:
        together[w.other, w.why].append(w.rank)
    for (other, why), ranks in sorted(together.items()):
        lines.append(f"  {ranks_in_words(ranks)} for rank {other}: {why}")
    if not waits:
        lines.append("  nobody for anybody")
    for circle in circles(waits):
        lines.append(
            "circle: "
            f"{in_words(circle)} (a deadlock, unless these are asynchronous operations that a rank will come back to)"
        )
    for rank, behind in holders(waits).items():
        lines.append(f"rank {rank} waits for nobody here, and holds up {ranks_in_words(behind)}")
    return lines
