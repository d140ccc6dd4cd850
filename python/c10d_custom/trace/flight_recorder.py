"""The trace in the format of torch's Flight Recorder, whose own analyzer reads it (`torchfrtrace`): files that are
pickles, which we write and never read.

That analyzer compares, group by group, the ranks' entries of equal numbers: who has none is missing, and whose kind,
sizes, dtype or state differ is at fault. What it would misread is left out or told so that it does not:

- A collective that failed before this rank had announced it: the others have never seen this rank in it.
- Collectives so old that other ranks may have forgotten them. All cut at the same number, so that none seems missing.
- Messages that went well, and receives from any rank. The others are the entries of small groups, one for each sender,
  receiver and tag: the analyzer expects every rank of a group in each of its entries.

Names begin with "nccl:", the only prefix that the analyzers of all torch versions take; ``comm_lib_version`` is ours.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..call import Op
from ..dtypes import BY_DTYPE
from ..transport.call_log import UNDER_WAY
from .file import put

if TYPE_CHECKING:
    from ..transport.call_log import Record
    from .file import GroupTrace


VERSION = "2.10"
_BLOCK = 32  # cuts are at its multiples: ranks that are not equally far still cut alike
_KNOWN = {op.name for op in Op if op is not Op.rejected}
_ITEM_BYTES = {d.name: d.item_bytes for d in BY_DTYPE.values()}
# c10::toString of torch's ScalarType, where that is not the dtype's name with a capital.
_SCALAR_TYPES = {
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "bool": "Bool",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "bcomplex32": "BComplex32",
    "qint8": "QInt8",
    "quint8": "QUInt8",
    "qint32": "QInt32",
    "quint4x2": "QUInt4x2",
    "quint2x4": "QUInt2x4",
}


def scalar_type(dtype: str) -> str:
    """What torch's C++ calls the dtype of that name."""
    return _SCALAR_TYPES.get(dtype, dtype.capitalize())


def write(beginning: str, rank: int, groups: Sequence[GroupTrace], kept: int) -> str:
    """Writes the rank's file, in the place of an older one. Returns its path: ``beginning``, which the user has put
    into TORCH_FR_DUMP_TEMP_FILE, and the global rank."""
    path = f"{beginning}{rank}"
    os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
    put(path, pickle.dumps(dump_of(groups, kept), protocol=2))  # as torch writes them
    return path


def dump_of(groups: Sequence[GroupTrace], kept: int) -> dict[str, Any]:
    """What a file holds, before it is pickled. ``kept``: how many collectives of a group each rank remembers."""
    entries: list[tuple[float, dict[str, Any]]] = []
    config: dict[str, dict[str, str]] = {}
    status: dict[str, dict[str, int]] = {}
    for number, group in enumerate(groups):
        name = _name(group)
        collectives = [c for c in group.calls if not c.is_message]
        config[name] = _config(name, group.members)
        status[str(number)] = _status(collectives)
        for call in _comparable(group, collectives, kept):
            sizes = _sizes(call, group.size)
            entries.append((call.issued, _entry(call, number, name, _operation(call), call.number, sizes)))
        counts: defaultdict[str, int] = defaultdict(int)
        for call in group.calls:
            if call.is_message and call.state != "done" and call.peer >= 0:
                channel, members, what = _channel(group, name, call)
                config[channel] = _config(channel, members)
                counts[channel] += 1
                sizes = [_items(call.in_bytes or call.out_bytes, call)], [_items(call.in_bytes or call.out_bytes, call)]
                entries.append((call.issued, _entry(call, number, channel, what, counts[channel], sizes, p2p=True)))
    entries.sort(key=lambda timed: timed[0])
    for place, (_, entry) in enumerate(entries):
        entry["record_id"] = place
    return {
        "version": VERSION,
        "comm_lib_version": f"c10d-custom {__version__}",
        "pg_config": config,
        "pg_status": status,
        "entries": [entry for _, entry in entries],
    }


def _name(group: GroupTrace) -> str:
    """The same on all its ranks, and of no other group of this process."""
    return group.name or f"(unnamed, {group.members[0]} to {group.members[-1]})"


def _config(name: str, members: Iterable[int]) -> dict[str, str]:
    return {"name": name, "desc": "undefined", "ranks": str(list(members))}


def _status(collectives: Iterable[Record]) -> dict[str, int]:
    def last(numbers: Iterable[int]) -> int:
        return max(numbers, default=-1)

    return {
        "last_enqueued_collective": last(c.number for c in collectives),
        "last_started_collective": last(c.number for c in collectives if c.began is not None),
        "last_completed_collective": last(c.number for c in collectives if c.state == "done"),
    }


def _comparable(group: GroupTrace, collectives: Sequence[Record], kept: int) -> list[Record]:
    announced = next((p.entered for p in group.peers if p.rank == group.rank), None)
    furthest = max((p.entered for p in group.peers if p.entered is not None), default=0)
    furthest = max([furthest, *(c.number for c in collectives if c.state != "queued")])
    forgotten = furthest - kept if kept else 0
    cut = -(-forgotten // _BLOCK) * _BLOCK if forgotten > 0 else 0
    return [
        c
        for c in collectives
        if c.operation in _KNOWN
        and c.number > cut
        and (announced is None or c.number <= announced or c.state in UNDER_WAY or c.state == "done")
    ]


def _uneven(call: Record) -> bool:
    """Whether its parts differ in size, and it is no all_to_all, of which the analyzer expects that."""
    return not call.count.isdigit() and call.operation != "all_to_all"


def _operation(call: Record) -> str:
    return f"nccl:{call.operation}_v" if _uneven(call) else f"nccl:{call.operation}"


def _items(nbytes: int, call: Record) -> list[int]:
    return [nbytes // _ITEM_BYTES.get(call.dtype, 1)]


def _sizes(call: Record, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """(input sizes, output sizes) as flat tensors, with what the analyzer expects to be equal on all ranks equal."""
    if call.operation == "all_to_all":
        return [_items(call.in_bytes, call)], [_items(call.out_bytes, call)]
    if _uneven(call):  # the sum of the parts
        total = [_items(max(call.in_bytes, call.out_bytes), call)]
        return total, total
    part, whole = [int(call.count)], [int(call.count) * ranks]
    inputs = whole if call.operation in ("reduce_scatter", "scatter") else part
    outputs = whole if call.operation in ("all_gather", "gather") else part
    return [inputs], [outputs]


def _channel(group: GroupTrace, name: str, call: Record) -> tuple[str, list[int], str]:
    """(its name, its members, the operation with their places among them) of the small group of a message."""
    me, other = group.members[group.rank], group.members[call.peer]
    members = sorted({me, other})
    here, there = members.index(me), members.index(other)
    sends = call.operation == "send"
    source, target = (me, other) if sends else (other, me)
    what = f"nccl:send {here}->{there}" if sends else f"nccl:recv {here}<-{there}"
    return f"{name}, rank {source} to rank {target}, tag {call.tag}", members, what


def _entry(
    call: Record,
    group: int,
    name: str,
    what: str,
    number: int,
    sizes: tuple[list[list[int]], list[list[int]]],
    p2p: bool = False,
) -> dict[str, Any]:
    dtypes = [scalar_type(call.dtype)]
    done = call.state == "done"
    entry = {
        "frames": [{"name": f.name, "filename": f.filename, "line": f.line} for f in call.frames],
        "record_id": 0,
        "pg_id": group,
        "process_group": (name, "undefined"),
        "thread_name": "",
        "thread_id": "",
        "collective_seq_id": number,
        "p2p_seq_id": number if p2p else 0,
        "op_id": number,
        "profiling_name": what,
        "time_created_ns": int(call.issued * 1e9),
        "input_sizes": sizes[0],
        "input_dtypes": dtypes,
        "output_sizes": sizes[1],
        "output_dtypes": dtypes,
        "state": "completed" if done else "scheduled" if call.began is None else "started",
        "time_discovered_started_ns": None if call.began is None else int(call.began * 1e9),
        "time_discovered_completed_ns": int(call.ended * 1e9) if done and call.ended is not None else None,
        "retired": call.ended is not None,
        "timeout_ms": 0,  # not remembered
        "is_p2p": p2p,
    }
    if done and call.began is not None and call.ended is not None:
        entry["duration_ms"] = (call.ended - call.began) * 1e3
    return entry
