"""What is asked of a transport: a collective (Call), a message (Message), and which primitives there are (Op). And the
time-outs of calls as callers give them, of any length, in numbers that every clock and system call below takes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from . import dtypes

# Parts may differ: the transport compares them pairwise. Of a gather or scatter it is the root that knows, and the
# count of every other rank is that of its own part.
ANY_COUNT = 2**64 - 1
LONGEST = 1e9  # s: 31 years stand for ever. In nanoseconds, and added to any clock, it still fits 63 bits


def seconds_of(timeout: timedelta) -> float:
    """Its seconds, but LONGEST for what is longer: also where torch has wrapped that around, as it does with
    timedelta.max, to less than any caller means."""
    seconds = timeout.total_seconds()
    return seconds if -LONGEST < seconds < LONGEST else LONGEST


class Op(IntEnum):
    """Primitive operations; the values are those of backend/shm/api.h. `rejected` is the last."""

    barrier = 0
    broadcast = 1
    all_reduce = 2
    reduce = 3
    all_gather = 4
    reduce_scatter = 5
    all_to_all = 6
    gather = 7
    scatter = 8
    monitored_barrier = 9  # of a rank that waits in one (c10d/monitored_barrier.py) while others are in a collective
    rejected = 10


# The classes from here on are written out, and the protocols are for the type checker alone: what a dataclass or a
# NamedTuple compiles, and a Protocol prepares, takes its time when a rank starts.


class Shape:
    """Of one operation. ``reads``, ``writes``: which ranks have an input, an output: AT_ROOT | ELSEWHERE for all, 0 for
    none; ``from_each``, ``to_each``: the input, the output has a part for each rank; ``reduces``: it takes a reduce
    op; ``rooted``: it has a root; ``counted``: torch's own groups tell autograd that the outputs have changed, and so
    do we (of all_to_all, where the outputs are a list)."""

    __slots__ = ("reads", "writes", "from_each", "to_each", "reduces", "rooted", "counted")

    def __init__(
        self,
        reads: int,
        writes: int,
        from_each: bool = False,
        to_each: bool = False,
        reduces: bool = False,
        counted: bool = False,
    ) -> None:
        self.reads, self.writes, self.from_each, self.to_each, self.reduces = reads, writes, from_each, to_each, reduces
        self.counted = counted
        self.rooted: bool = any(side in (AT_ROOT, ELSEWHERE) for side in (reads, writes))


AT_ROOT, ELSEWHERE = 1, 2
_ALL = AT_ROOT | ELSEWHERE
SHAPES = {
    Op.barrier: Shape(0, 0),
    Op.broadcast: Shape(AT_ROOT, ELSEWHERE),
    Op.all_reduce: Shape(_ALL, _ALL, reduces=True),
    Op.reduce: Shape(_ALL, AT_ROOT, reduces=True),
    Op.all_gather: Shape(_ALL, _ALL, to_each=True, counted=True),
    Op.reduce_scatter: Shape(_ALL, _ALL, from_each=True, reduces=True, counted=True),
    Op.all_to_all: Shape(_ALL, _ALL, from_each=True, to_each=True, counted=True),
    Op.gather: Shape(_ALL, AT_ROOT, to_each=True, counted=True),
    Op.scatter: Shape(AT_ROOT, _ALL, from_each=True),
    Op.monitored_barrier: Shape(0, 0),
}
REDUCING = tuple(op for op, shape in SHAPES.items() if shape.reduces)
ROOTED = tuple(op for op, shape in SHAPES.items() if shape.rooted)


class Memory(IntEnum):
    """Whose bytes the tensors of a Call are, to a transport of CPU tensors; the values are those of
    backend/shm/api.h."""

    host = 0
    staged = 1  # a device's, copied into host memory
    device = 2  # a device's: `agree` only
    device_ahead = 3  # a device's: `announce` only


if TYPE_CHECKING:
    from datetime import timedelta

    class Buffer(Protocol):
        """What transports use of a tensor: a torch.Tensor, contiguous, or a Region. ``nbytes``: its bytes, all of them
        from the address `data_ptr()` on."""

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

        def joined_at_home(self) -> bool:
            """Whether the calling thread's current stream is that of the issue."""

        def duration(self) -> float | None:
            """Milliseconds that it took, of one that is completed; None: nobody has asked for that in time."""

        def future(self, stream_ops: Sequence[Any]) -> torch.futures.Future[Any]:
            """A new future of tensors on the devices of all of ``stream_ops``."""

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


class Agreement:
    """What a collective's announcement told: its number; each rank's factor; each rank's (input sizes, output
    sizes) in bytes for a call whose count is ANY_COUNT, else None. The last two may be None where only the
    CPU transport reads them."""

    __slots__ = ("number", "factors", "sizes")

    def __init__(
        self, number: int, factors: list[float] | None = None, sizes: list[tuple[list[int], list[int]]] | None = None
    ) -> None:
        self.number, self.factors, self.sizes = number, factors, sizes


class Call:
    """One collective on one rank. ``inputs`` and ``outputs`` are contiguous tensors on one device:
    one of each, or one for each rank of the group (see api.h, CallArgs). ``timeout``: seconds; ``count``: elements of
    one part; ``root``: a group rank, -1 where there is none; ``redop``: a code of dtypes.REDUCE_OPS; ``factor``: this
    rank's, of PREMUL_SUM. ``copy_back`` holds (destination, source) pairs to be copied when the call is done.
    ``device``: the torch.device of the tensors, None for the CPU; ``ordinal``: which of this rank's devices that is, in
    the order in which the group's collectives came to them; ``stream_op``: what a transport knows of a call on a
    device."""

    def __init__(
        self,
        op: Op,
        name: str,
        dtype: dtypes.DType,
        timeout: float,
        inputs: Sequence[Buffer] | None = None,
        outputs: Sequence[Buffer] | None = None,
        root: int = -1,
        count: int = 0,
        redop: int = 0,
        factor: float = 0.0,
        device: torch.device | None = None,
        memory: Memory = Memory.host,
    ) -> None:
        self.op, self.name, self.dtype, self.timeout = op, name, dtype, timeout
        self.inputs: Sequence[Buffer] = [] if inputs is None else inputs
        self.outputs: Sequence[Buffer] = [] if outputs is None else outputs
        self.root, self.count, self.redop, self.factor = root, count, redop, factor
        self.device, self.ordinal, self.memory = device, 0, memory
        self.stream_op: StreamOp | None = None
        self.copy_back: list[tuple[torch.Tensor, torch.Tensor]] = []


# Tags of messages: c10d's callers use those from 0 up; below are ours. Each of these has a range of its own: `number`
# is less than 2^39, a window's less than 2^21.
def tag_of_barrier(number: int) -> int:
    """Of the words of a monitored barrier."""
    return -1 - number


def tag_of_window(window: int, number: int) -> int:
    """Of the heads of a window over messages (0), or of the bytes of its put ``number``. Windows count from 1."""
    return -(window << 40) - number


def tag_of_pieces(number: int) -> int:
    """Of what is said of a large message between GPUs, both ways: this one and the next below."""
    return -(1 << 62) - 2 * number


class Message:
    """One send or receive on one rank. ``peer``: a group rank, -1 for a receive from any source; ``timeout``: seconds.
    The rest: as a Call's."""

    def __init__(
        self,
        name: str,
        tensor: Buffer,
        dtype: dtypes.DType,
        peer: int,
        tag: int,
        timeout: float,
        is_recv: bool,
        device: torch.device | None = None,
    ) -> None:
        self.name, self.tensor, self.dtype, self.peer, self.tag = name, tensor, dtype, peer, tag
        self.timeout, self.is_recv, self.device = timeout, is_recv, device
        self.stream_op: StreamOp | None = None
        self.copy_back: list[tuple[torch.Tensor, torch.Tensor]] = []


_Asked = TypeVar("_Asked", Call, Message)


def changed(asked: _Asked, **changes: Any) -> _Asked:
    """A copy in which these attributes have other values."""
    assert changes.keys() <= vars(asked).keys(), changes
    copy = object.__new__(type(asked))
    vars(copy).update(vars(asked), **changes)
    return copy


def copy_back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """As the core writes where no copy is needed: past autograd, and into tensors of inference mode, too. Those modes
    are the calling thread's, which need not be the one that issued the call."""
    with torch.inference_mode():
        for destination, plain in pairs:
            destination.data.copy_(plain.view(destination.shape))
