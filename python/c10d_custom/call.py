"""What is being asked of a transport, and how two ranks' askings differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from . import dtypes

if TYPE_CHECKING:
    import torch


ANY_COUNT = 2**64 - 1  # ranks may differ: the transport compares the parts pairwise


class Op(IntEnum):
    """Primitive operations; the values are those of backend/shm/api.h."""

    barrier = 0
    broadcast = 1
    all_reduce = 2
    reduce = 3
    all_gather = 4
    reduce_scatter = 5
    all_to_all = 6
    gather = 7
    scatter = 8
    rejected = 9


class Memory(IntEnum):
    """Whose bytes the tensors of a Call are, to a transport of CPU tensors; the values are those of
    backend/shm/api.h."""

    host = 0
    staged = 1  # a device's, copied into host memory
    device = 2  # a device's: `agree` only


class Buffer(Protocol):
    """What transports use of a tensor: a torch.Tensor, contiguous, or a Region. ``nbytes``: its bytes, all of them from
    the address `data_ptr()` on."""

    @property
    def nbytes(self) -> int: ...

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...


class StreamOp(Protocol):
    """What c10d/ asks of a call on a device (transport/cuda/stream_op.py). ``captured``: a CUDA graph holds it, and
    runs it. Any thread may ask."""

    captured: bool

    def completed(self) -> bool:
        """Whether the device is done with it. Raises the error it ended with."""

    def join(self) -> None:
        """The calling thread's current stream waits for it; the host does not. Raises the error it ended with, and
        AbortedError if it never reached the device."""

    def future(self) -> torch.futures.Future[Any]:
        """A new future of tensors on the device."""

    def resolve(self, future: torch.futures.Future[Any], value: object, stream_ops: Sequence[Any]) -> None:
        """Gives the future its value, for streams that come after all of ``stream_ops``."""


class Region:
    """A Buffer that is no tensor: ``count`` items, ``nbytes`` bytes from ``address`` on, which somebody else keeps."""

    __slots__ = ("address", "nbytes", "count")

    def __init__(self, address: int, nbytes: int, count: int) -> None:
        self.address, self.nbytes, self.count = address, nbytes, count

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a collective's announcement told: its number; each rank's factor; each rank's (input sizes, output
    sizes) in bytes for a call whose count is ANY_COUNT, else None. The last two may be None where only the
    CPU transport reads them."""

    number: int
    factors: list[float] | None = None
    sizes: list[tuple[list[int], list[int]]] | None = None


@dataclass(slots=True)
class Call:
    """One collective on one rank. ``inputs`` and ``outputs`` are contiguous tensors on one device:
    one of each, or one for each rank of the group (see api.h, CallArgs). ``timeout``: seconds; ``count``: elements of
    one part; ``root``: a group rank, -1 where there is none; ``redop``: a code of dtypes.REDUCE_OPS; ``factor``: this
    rank's, of PREMUL_SUM. ``copy_back`` holds (destination, source) pairs to be copied when the call is done.
    ``device``: the torch.device of the tensors, None for the CPU; ``stream_op``: what a transport knows of a call on a
    device."""

    op: Op
    name: str
    dtype: dtypes.DType
    timeout: float
    inputs: Sequence[Buffer] = field(default_factory=list)
    outputs: Sequence[Buffer] = field(default_factory=list)
    root: int = -1
    count: int = 0
    redop: int = 0
    factor: float = 0.0
    device: torch.device | None = None
    memory: Memory = Memory.host
    stream_op: StreamOp | None = None
    copy_back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def fast_all_reduce(cls, address: int, count: int, kind: dtypes.Kind, nanoseconds: int) -> Call:
        """In place, of ``count`` items of the dtypes.Kind at ``address``; ``nanoseconds``: its time-out."""
        region = [Region(address, count * kind.dtype.item_bytes, count)]
        return cls(
            Op.all_reduce, "all_reduce", kind.dtype, nanoseconds / 1e9, region, region, count=count, redop=kind.redop
        )


@dataclass(slots=True)
class Message:
    """One send or receive on one rank. ``peer``: a group rank, -1 for a receive from any source; ``timeout``: seconds.
    The rest: as a Call's."""

    name: str
    tensor: Buffer
    dtype: dtypes.DType
    peer: int
    tag: int
    timeout: float
    is_recv: bool
    device: torch.device | None = None
    stream_op: StreamOp | None = None
    copy_back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


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
        if op in (Op.all_reduce, Op.reduce, Op.reduce_scatter):
            text.append(dtypes.REDUCE_OPS.get(self.redop, f"reduce op {self.redop}"))
        if op is not Op.barrier:
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
    lines = [
        f"  rank {r}{'' if members[r] == r else f' (global {members[r]})'}: "
        f"{'has not called yet' if f is None else f}{(parts or {}).get(r, '')}"
        for r, f in sorted(fingerprints.items())
    ]
    head = f"they differ in {', '.join(fields)}" if fields else "they differ in the sizes of their parts"
    return f"{head}:\n" + "\n".join(lines)
