"""What a trace file says, how it is written and read. It is JSON; a person reads it by ``python -m c10d_custom trace``.

One file is one process, which is one rank of each of its groups. Ranks of a group are numbered within it; `members`
gives their global ranks. Times are seconds since 1970."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field, replace

from ..threads import threading
from ..transport.call_log import Frame, Peer, Record

FORMAT = "c10d-custom trace 2"


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
    """``reason``: why it was written, in a line."""

    rank: int
    pid: int
    host: str
    written: float
    reason: str
    groups: list[GroupTrace] = field(default_factory=list)


def to_text(dump: Dump) -> str:
    """The file's text: a line for each rank and each call."""
    row, lines = ",\n   ".join, []
    for group in dump.groups:
        about = {"name": group.name, "rank": group.rank, "size": group.size, "members": group.members}
        lines.append(
            f'  {json.dumps(about)[:-1]}, "peers": [\n   {row(json.dumps(asdict(p)) for p in group.peers)}], '
            f'"calls": [\n   {row(json.dumps(asdict(c)) for c in group.calls)}]}}'
        )
    process = {"format": FORMAT, **asdict(replace(dump, groups=[]))}
    return json.dumps(process).removesuffix("]}") + "\n" + ",\n".join(lines) + "]}\n"


def from_text(text: str) -> Dump:
    """The Dump of a file's text. Raises ValueError where it is none, or was cut off."""
    try:
        known = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a trace of c10d-custom, or cut off: {error}") from error
    if not isinstance(known, dict) or known.pop("format", None) != FORMAT:
        raise ValueError("not a trace of c10d-custom, or of another version of it")
    try:
        groups = known.pop("groups")
        for group in groups:
            group["peers"] = [Peer(**peer) for peer in group["peers"]]
            group["calls"] = [Record(**call) for call in group["calls"]]
            for call in group["calls"]:
                call.frames = tuple(Frame(*frame) for frame in call.frames)
        return Dump(**known, groups=[GroupTrace(**group) for group in groups])
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a trace of c10d-custom as this version writes it: {error}") from error


NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def put(path: str, data: bytes) -> None:
    """Writes a file that its user alone may read, in the place of an older one, whole or not at all."""
    folder, name = os.path.split(os.path.abspath(path))
    # torch's analyzer takes what ends in a number, or has the beginning of the name in it: this has neither.
    draft = os.path.join(folder, f".{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}.c10d-custom-draft")
    fd = os.open(draft, NEW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(draft, os.path.join(folder, name))
    except BaseException:
        os.unlink(draft)
        raise
