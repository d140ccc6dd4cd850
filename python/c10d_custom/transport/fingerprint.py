"""What a rank says it is calling, and the table of an error that shows how the ranks' calls differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import dtypes
from ..call import ANY_COUNT, REDUCING, Op
from .parts import AT_THE_ROOT, listed, named, unfit

if TYPE_CHECKING:
    from .parts import Sizes


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a rank announced: the fields in which ranks may not differ."""

    seq: int
    op: int
    redop: int
    dtype: int
    root: int
    count: int
    device: int  # 0: the CPU; else 1 + the ordinal of the rank's device in the group

    def __str__(self) -> str:
        op = Op(self.op) if self.op in Op.__members__.values() else None
        if op is Op.rejected:
            return f"a call whose arguments were refused (#{self.seq})"
        text = [f"{op.name if op is not None else f'operation {self.op}'} #{self.seq}"]
        if op in REDUCING:
            text.append(dtypes.REDUCE_OPS.get(self.redop, f"reduce op {self.redop}"))
        if op not in (Op.barrier, Op.monitored_barrier):
            dtype = dtypes.BY_CODE.get(self.dtype)
            count = "uneven" if self.count == ANY_COUNT else self.count
            text.append(f"{dtype.name if dtype else f'dtype {self.dtype}'}[{count}]")
        if self.root >= 0:
            text.append(f"root {self.root}")
        if self.device:
            text.append("on CUDA" if self.device == 1 else f"on CUDA (its GPU {self.device - 1} in this group)")
        return " ".join(text)

    def differing_fields(self, other: Fingerprint) -> list[str]:
        """The names of the fields in which the two differ, but for the sequence number."""
        names = ("op", "redop", "dtype", "count", "root", "device")
        return [n for n in names if getattr(self, n) != getattr(other, n)]


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
    head = f"they differ in {', '.join(fields) or 'the sizes of their parts'}"
    if fields == ["device"] and all(f.device for f in known.values()):
        head += (
            " (GPU 0 in a group is the one that a rank's collectives came to first, GPU 1 the next: all ranks must "
            "take theirs in the same order)"
        )
    if first is not None and not fields and (pairs := unfit(first.op, first.root, parts)):
        head += f" ({named(pairs)})"
    return f"{head}:\n" + "\n".join(lines)


def _elements(fingerprint: Fingerprint, sizes: Sizes) -> Sizes:
    dtype = dtypes.BY_CODE.get(fingerprint.dtype)
    item = dtype.item_bytes if dtype else 1
    gives, gets = ([n // item for n in row] for row in sizes)
    return gives, gets
