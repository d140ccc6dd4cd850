"""What a rank says it is calling, and the table of an error that shows how the ranks' calls differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import dtypes
from ..call import ANY_COUNT, REDUCING, Op


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a rank announced: the fields in which ranks may not differ."""

    seq: int
    op: int
    redop: int
    dtype: int
    root: int
    count: int
    device: int

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
            text.append("on CUDA")
        return " ".join(text)

    def differing_fields(self, other: Fingerprint) -> list[str]:
        """Their names, but for the sequence number."""
        names = ("op", "redop", "dtype", "count", "root", "device")
        return [n for n in names if getattr(self, n) != getattr(other, n)]


def mismatch_table(
    fingerprints: Mapping[int, Fingerprint | None], members: Sequence[int], parts: Mapping[int, str] | None = None
) -> str:
    """The side-by-side table of an error message. ``fingerprints``: group rank -> Fingerprint, or
    None where a rank has not called yet; ``members``: group rank -> global rank; ``parts``: group rank ->
    text on the sizes of a call whose count may differ."""
    known = [f for f in fingerprints.values() if f is not None]
    fields = sorted({n for f in known for n in known[0].differing_fields(f)}) if known else []
    if all(f.op in (Op.gather, Op.scatter) for f in known) and any(f.count == ANY_COUNT for f in known):
        fields = [n for n in fields if n != "count"]  # each rank's is that of its own part
    lines = [
        f"  rank {r}{'' if members[r] == r else f' (global {members[r]})'}: "
        f"{'has not called yet' if f is None else f}{(parts or {}).get(r, '')}"
        for r, f in sorted(fingerprints.items())
    ]
    head = f"they differ in {', '.join(fields)}" if fields else "they differ in the sizes of their parts"
    return f"{head}:\n" + "\n".join(lines)
