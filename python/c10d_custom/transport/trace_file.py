"""What a trace file says, and how it is written and read: text that a person can read, too.

One file is one process, which is one rank of each of its groups. Ranks of a group are numbered within it; `members`
gives their global ranks. Times are seconds since 1970, in UTC where written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

HEAD = "c10d-custom trace 1"
MESSAGES = "send", "recv"

# States: of a call, by the codes of the native core's Status; and before it ends.
STATES = {
    0: "done",
    2: "timed_out",
    3: "peer_lost",
    4: "mismatch",
    5: "aborted",
    6: "refused",
    7: "broken",
    8: "interrupted",
    9: "forked",
}
UNDER_WAY = "queued", "waiting", "running"


class Frame(NamedTuple):
    """A place in the user's program."""

    filename: str
    line: int
    name: str


@dataclass(slots=True)
class Record:
    """One call. ``number``: of collectives, the same on all ranks; of messages, this rank's own. ``peer``: the root; of
    messages the other rank, -1 for any. ``began``: a collective left the queue; both sides of a long message were
    in. ``frames``: from where it was called, innermost first, where that is known; not in the file."""

    operation: str
    number: int
    reduce: str
    dtype: str
    count: str
    in_bytes: int
    out_bytes: int
    peer: int
    tag: int
    state: str
    issued: float
    began: float | None
    ended: float | None
    frames: Sequence[Frame] = ()

    @property
    def is_message(self) -> bool:
        return self.operation in MESSAGES

    def asked(self) -> str:
        """What was asked for, without the number."""
        if self.is_message:
            peer = "any rank" if self.peer < 0 else f"rank {self.peer}"
            way = f"to {peer}" if self.operation == "send" else f"from {peer}"
            return f"{self.operation} of {self.in_bytes or self.out_bytes} bytes of {self.dtype} {way}, tag {self.tag}"
        if self.operation == "barrier":
            return "barrier"
        parts = [
            self.operation,
            self.reduce if self.reduce != "-" else "",
            f"{self.dtype}[{self.count}]",
            f"root {self.peer}" if self.peer >= 0 else "",
        ]
        return " ".join(p for p in parts if p)


@dataclass(slots=True)
class Peer:
    """A rank as another one sees it. ``entered``: the number of the last collective it announced, None if not known."""

    rank: int
    pid: int
    state: str
    entered: int | None = None
    calling: str = "-"


@dataclass
class GroupTrace:
    name: str
    rank: int
    size: int
    members: list[int]
    peers: list[Peer] = field(default_factory=list)
    calls: list[Record] = field(default_factory=list)


@dataclass
class Dump:
    rank: int
    pid: int
    host: str
    written: float
    reason: str
    groups: list[GroupTrace] = field(default_factory=list)
    whole: bool = True


_COLUMNS = ("operation number reduce dtype count in out peer tag state issued(UTC) began ended").split()
_PEER_COLUMNS = "rank pid state entered calling".split()
_PROCESS = re.compile(r"rank (\d+), pid (\d+) on (\S+), written (\S+): (.*)")
_GROUP = re.compile(r'group (".*"), rank (\d+) of (\d+), global ranks ([\d ]+)')


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def _later(seconds: float | None, since: float) -> str:
    return "-" if seconds is None else f"{seconds - since:+.6f}"


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    rows = [columns, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return ["  " + "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]


def write(dump: Dump) -> str:
    """The file's text. It ends with a line `end`: without it, the writer was cut off."""
    lines = [
        HEAD,
        f"rank {dump.rank}, pid {dump.pid} on {dump.host}, written {_time(dump.written)}: "
        f"{dump.reason.splitlines()[0] if dump.reason else '-'}",
    ]
    for g in dump.groups:
        lines += [
            "",
            f"group {json.dumps(g.name)}, rank {g.rank} of {g.size}, global ranks {' '.join(map(str, g.members))}",
        ]
        lines += _table(
            ["ranks:", *_PEER_COLUMNS],
            [
                ["", str(p.rank), str(p.pid), p.state, "-" if p.entered is None else str(p.entered), p.calling]
                for p in g.peers
            ],
        )
        lines += _table(
            ["calls:", *_COLUMNS],
            [
                [
                    "",
                    c.operation,
                    str(c.number),
                    c.reduce,
                    c.dtype,
                    c.count,
                    str(c.in_bytes),
                    str(c.out_bytes),
                    str(c.peer),
                    str(c.tag),
                    c.state,
                    _time(c.issued),
                    _later(c.began, c.issued),
                    _later(c.ended, c.issued),
                ]
                for c in g.calls
            ],
        )
    return "\n".join([*lines, "end", ""])


def _record(words: list[str]) -> Record:
    operation, number, reduce, dtype, count, in_bytes, out_bytes, peer, tag, state, when, began, ended = words
    issued = _seconds(when)
    after = {t: None if t == "-" else issued + float(t) for t in (began, ended)}
    return Record(
        operation,
        int(number),
        reduce,
        dtype,
        count,
        int(in_bytes),
        int(out_bytes),
        int(peer),
        int(tag),
        state,
        issued,
        after[began],
        after[ended],
    )


def _peer(line: str) -> Peer:
    rank, pid, state, entered, calling = line.split(maxsplit=4)
    return Peer(int(rank), int(pid), state, None if entered == "-" else int(entered), calling)


def read(text: str) -> Dump:
    """The Dump of a file's text. Raises ValueError where it is none."""
    lines = text.splitlines()
    process = _PROCESS.fullmatch(lines[1]) if len(lines) > 1 and lines[0] == HEAD else None
    if process is None:
        raise ValueError("not a trace of c10d-custom")
    rank, pid, host, written, reason = process.groups()
    dump = Dump(int(rank), int(pid), host, _seconds(written), reason, whole=lines[-1] == "end")
    part = None
    body = lines[2:-1]  # without the end; of a file that was cut, without a last line that may be half of one
    for number, line in enumerate(body, 3):
        try:
            if group := _GROUP.fullmatch(line):
                name, rank, size, members = group.groups()
                dump.groups.append(
                    GroupTrace(json.loads(name), int(rank), int(size), [int(m) for m in members.split()])
                )
            elif line.startswith(("  ranks:", "  calls:")):
                part = line.split()[0]
            elif line.strip():
                if part == "ranks:":
                    dump.groups[-1].peers.append(_peer(line))
                else:
                    dump.groups[-1].calls.append(_record(line.split()))
        except (ValueError, IndexError) as error:
            raise ValueError(f"line {number} makes no sense: {line!r}") from error
    return dump
