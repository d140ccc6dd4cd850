"""Which way a collective of CUDA tensors goes inside a host, in the mode that peers.py has found to work: all
thresholds, and the one choice.

A GPU runs the kernels of one process at a time, and the processes take turns (but for MPS, which runs them side by
side). So a step of kernels is over when every rank that shares the GPU has had its turn, however little it does. Copies
between host and GPU take no turns: other engines make them. docs/results has what was measured.

The choice depends on nothing but what all ranks agree on: the call, and `Facts`, which are alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ...call import ANY_COUNT, SHAPES, Op
from ...dtypes import RedOp

if TYPE_CHECKING:
    from ...call import Call
    from ...config import Config


IN_PLACE_RANKS, FUSED_RANKS = 16, 16  # of a group, at most
HALVES = 2  # of staging memory, which rounds take in turn
FUSED_STAGING = 32 << 20  # bytes, at most, of the fused kernels' own: calls of more than half take several kernels
FUSED_BLOCKS = 36  # of a kernel
FLAGGED_BYTES = 64 << 10  # the most of an all_reduce in which every word has a flag; pads have room for so many
_IN_ONE_KERNEL = Op.all_reduce, Op.broadcast, Op.all_gather, Op.reduce_scatter
_PREMUL_SUM = int(RedOp.PREMUL_SUM)
_SIDE_BY_SIDE = 32  # MPS runs ranks side by side: host memory, which needs no turns, pays up to this part of its size
MESSAGE_SLOTS = 4  # pieces of messages that a rank has at once in each memory that they pass through


def piece_bytes(config: Config) -> int:
    """Of a large message: long enough that what is said of a piece costs little, short enough that they overlap."""
    return min(2 << 20, config.cuda_staging_bytes // MESSAGE_SLOTS)


def whole_bytes(config: Config) -> int:
    """The most of a message that goes whole, through host memory."""
    return min(1 << 20, piece_bytes(config))


class Way(Enum):
    ALONE = "a group of one rank: on its stream"
    FUSED = "by kernels that wait for each other (p2p.py)"
    IN_PLACE = "by one kernel of the first rank, which reads and writes all ranks' tensors (in_place.py)"
    THROUGH_HOST = "through pinned host memory (staged.py)"
    ROUNDS = "through staging memory that the ranks have mapped (shared.py); all_reduce: all read all inputs whole"
    TWO_SHOT = "the same: each rank reduces its part, then reads the others' results"


@dataclass
class Facts:
    """Of a group of ``size`` ranks: ``gpus``: how many GPUs they have; ``sharers``: the most ranks that have one of
    those; ``side_by_side``: whether those run kernels of different processes at once; ``fused``: whether fused kernels
    serve them; ``in_place``: whether the ranks map each other's tensors, as far as is known by now; ``half``: bytes
    that a rank puts into its staging memory at once."""

    size: int
    gpus: int
    sharers: int
    side_by_side: bool
    fused: bool
    in_place: bool
    half: int


def host_limit(facts: Facts, config: Config) -> int:
    """The most bytes of a call, of a rank's inputs or its outputs, that go through host memory."""
    if facts.gpus == facts.size:
        return 0
    return config.cuda_host_bytes // (_SIDE_BY_SIDE if facts.side_by_side else 1)


def choose(call: Call, facts: Facts, config: Config) -> Way | None:
    """The Way of a Call. None: only its parts' sizes can tell (`uneven`), which ranks know when they have met."""
    if facts.size == 1:
        return Way.ALONE
    if facts.fused and call.op in _IN_ONE_KERNEL and call.count != ANY_COUNT:
        return Way.FUSED
    if facts.in_place and call.op in _IN_ONE_KERNEL:
        if max(sum(t.nbytes for t in side) for side in (call.inputs, call.outputs)) > config.cuda_in_place_bytes:
            return Way.IN_PLACE
    limit = host_limit(facts, config)
    if call.count == ANY_COUNT:
        return None if limit else Way.ROUNDS
    shape = SHAPES[call.op]
    parts = facts.size if shape.from_each or shape.to_each else 1
    if limit and parts * call.count * call.dtype.item_bytes <= limit:
        return Way.THROUGH_HOST
    return rounds(call, facts, config)


def uneven(sizes: Sequence[tuple[list[int], list[int]]], facts: Facts, config: Config) -> Way:
    """Of a call whose parts differ, of these bytes: each rank's (inputs, outputs)."""
    largest = max((sum(side) for of_rank in sizes for side in of_rank), default=0)
    return Way.THROUGH_HOST if largest <= host_limit(facts, config) else Way.ROUNDS


def rounds(call: Call, facts: Facts, config: Config) -> Way:
    """How, if through staging memory. Two-shot is one step of kernels more: where ranks share a GPU, a turn of each."""
    if call.op is not Op.all_reduce or facts.gpus == 1:
        return Way.ROUNDS
    return Way.ROUNDS if call.inputs[0].nbytes <= min(config.cuda_one_shot_bytes, facts.half) else Way.TWO_SHOT


def one_shot_bytes(ranks: int) -> int:
    """Prior art's: the most bytes of a fused all_reduce in which every rank reads all inputs, not its slice of them."""
    return (512 if ranks <= 4 else 256) << 10


def fused_all_reduce(nbytes: int, redop: int, ranks: int) -> str:
    """Which of the fused kernels does so much."""
    if nbytes <= FLAGGED_BYTES and redop != _PREMUL_SUM:
        return "Flagged"
    return "OneShot" if nbytes <= one_shot_bytes(ranks) else "TwoShot"
