"""How the ranks' calls of one collective differ: the table of an error that shows it, and parts of different sizes,
what each rank of an uneven collective gives to each other one and gets from it, and which of that does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .. import dtypes
from ..call import ANY_COUNT, SHAPES, Op

if TYPE_CHECKING:
    from ..call import Buffer, Call
    from .call_log import Fingerprint

    # Of one rank: for each rank, what it gives and what it gets; one tensor for all of them stands in every place.
    Sizes = tuple[Sequence[int], Sequence[int]]


# Where the root alone has a part for each rank: the count of every other rank may be that of its own part.
AT_THE_ROOT = tuple(op for op, shape in SHAPES.items() if shape.rooted and (shape.from_each or shape.to_each))

_TOLD = 16  # ranks whose parts an error lists
_UNFIT = 3  # pairs of ranks that it names


def sizes_of(call: Call, size: int) -> Sizes:
    """In bytes, in a group of ``size`` ranks; as the core's table has them (backend/shm/collective.cpp, announce)."""
    return _row(call.inputs, size), _row(call.outputs, size)


def _row(tensors: Sequence[Buffer], size: int) -> list[int]:
    return [t.nbytes for t in tensors] if len(tensors) == size else [tensors[0].nbytes if tensors else 0] * size


def moves(op: int, root: int, giver: int, taker: int) -> bool:
    """Whether the operation moves a part from the one rank to the other."""
    shape = SHAPES[Op(op)]
    return not shape.rooted or (giver if shape.from_each else taker) == root


def unfit(op: int, root: int, sizes: Mapping[int, Sizes]) -> list[tuple[int, int, int, int]]:
    """(who gives, who gets, what the one gives, what the other expects) of all parts that do not fit."""
    return [
        (a, b, sizes[a][0][b], sizes[b][1][a])
        for a in sizes
        for b in sizes
        if sizes[a][0][b] != sizes[b][1][a] and moves(op, root, a, b)
    ]


def named(pairs: Sequence[tuple[int, int, int, int]]) -> str:
    """Text of what `unfit` has found."""
    text = [f"rank {a} gives rank {b} {given}, which expects {expected}" for a, b, given, expected in pairs[:_UNFIT]]
    return "; ".join(text + [f"and {len(pairs) - _UNFIT} more"] * (len(pairs) > _UNFIT))


def listed(op: int, sizes: Sizes) -> str:
    """Text of a rank's own parts, for its line of an error's table."""
    shape = SHAPES[Op(op)]
    text = []
    if shape.from_each or op == Op.all_gather:
        text.append(f"gives {_joined(sizes[0], shape.from_each)}")
    if shape.to_each:
        text.append(f"gets {_joined(sizes[1], shape.to_each)}")
    return ": " + ", ".join(text)


def _joined(row: Sequence[int], each: bool) -> str:
    if not each:
        return str(row[0])
    return ", ".join([*map(str, row[:_TOLD])] + ["..."] * (len(row) > _TOLD))


def mismatch_table(
    fingerprints: Mapping[int, Fingerprint | None], members: Sequence[int], sizes: Mapping[int, Sizes] | None = None
) -> str:
    """The side-by-side table of an error message. ``fingerprints``: group rank -> Fingerprint, or
    None where a rank has not called yet; ``members``: group rank -> global rank; ``sizes``: group rank -> bytes of the
    parts of an uneven call, where they are known."""
    known = {r: f for r, f in fingerprints.items() if f is not None}
    parts = {r: _elements(f, sizes[r]) for r, f in known.items() if sizes and r in sizes}
    first = next(iter(known.values()), None)
    fields = sorted({n for f in known.values() for n in f.differing_fields(first)}) if first else []
    lines = []
    for r, f in sorted(fingerprints.items()):
        who = f"rank {r}{'' if members[r] == r else f' (global {members[r]})'}"
        own = listed(f.op, parts[r]) if f is not None and r in parts else ""
        lines.append(f"  {who}: {'has not called yet' if f is None else f}{own}")
    if any(f.count == ANY_COUNT for f in known.values()) and all(f.op in AT_THE_ROOT for f in known.values()):
        fields = [name for name in fields if name != "count"]  # every other rank's is that of its own part
        parts |= {r: ([f.count] * len(members),) * 2 for r, f in known.items() if f.count != ANY_COUNT}
    unknown = len(known) < len(fingerprints) and all(f.count != ANY_COUNT for f in known.values())
    alike = "what is not known of all" if unknown else "the sizes of their parts"
    head = f"they differ in {', '.join(fields) or alike}"
    if fields == ["device"] and all(f.device for f in known.values()):
        head += (
            " (GPU 0 in a group is the one that a rank's collectives came to first, GPU 1 the next: "
            "all ranks must take theirs in the same order)"
        )
    if first is not None and not fields and (pairs := unfit(first.op, first.root, parts)):
        head += f" ({named(pairs)})"
    return f"{head}:\n" + "\n".join(lines)


def _elements(fingerprint: Fingerprint, sizes: Sizes) -> Sizes:
    dtype = dtypes.BY_CODE.get(fingerprint.dtype)
    item = dtype.item_bytes if dtype else 1
    gives, gets = ([n // item for n in row] for row in sizes)
    return gives, gets
