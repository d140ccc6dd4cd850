"""Which algorithm a collective over hosts takes: all thresholds, and the one choice.

A collective first finds out whether all ranks have called the same (`Agree`), unless the messages of its algorithm say
so themselves, and then moves the data (`Move`). The choice depends on nothing but what all ranks agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ...call import ANY_COUNT, Memory, Op

if TYPE_CHECKING:
    from ...call import Call
    from .layout import Hosts


MOST_RANKS = 16  # of a group in which each rank sends a message to each other one
_HOST_BYTES = 128 << 10  # that a host may send for one call of such messages, or of its leader's
_FLAT_LEAST, _FLAT_MOST, _LEADER_MOST = 64, 16 << 10, 64 << 10  # bytes of a tensor
_BARRIERS = (Op.barrier, Op.monitored_barrier)
# The leaders' messages have the lengths in leader_all_reduce.py, the largest of which is at least _LEADER_MOST.


class Agree(Enum):
    LEADERS = "in the messages of leader_all_reduce.py"
    FLAT = "in those of flat_exchange.py, without payload"
    ROUNDS = "in rounds of a dissemination barrier between the hosts: groups of many ranks"


class Move(Enum):
    NOTHING = "the tensors are a device's, or there are none"
    REJECTED = "this rank refused the call: the others are told"
    LEADERS = "with the agreement, by the leaders"
    FLAT = "with the agreement, from each rank to each"
    PIPELINED = "an all_reduce, by pipelined_reduce.py (where two_level.py sends a reduce, too)"
    TWO_LEVEL = "inside hosts and between them, by two_level.py"


@dataclass(frozen=True)
class Limits:
    """Bytes of the largest tensor of a flat exchange, and of an all_reduce by leaders."""

    flat: int
    leader: int

    @classmethod
    def of(cls, size: int, hosts: Hosts) -> Limits | None:
        """For the Hosts of a group of ``size`` ranks; None if it is too large for messages from each to each."""
        if size > MOST_RANKS:
            return None
        widest = max(map(len, hosts.ranks))
        return cls(
            max(_FLAT_LEAST, min(_FLAT_MOST, _HOST_BYTES // max(1, widest * (size - widest)))),
            min(_LEADER_MOST, _HOST_BYTES // (widest * (len(hosts.ranks) - 1))),
        )


def choose(call: Call, limits: Limits | None) -> tuple[Agree | None, Move]:
    """(Agree, Move) of a Call in a group with these Limits."""
    if call.op is Op.rejected:
        return None, Move.REJECTED
    agree = Agree.ROUNDS if limits is None else Agree.FLAT
    if call.memory is Memory.device:
        return agree, Move.NOTHING
    if limits is not None:
        if call.op is Op.all_reduce:
            small = call.inputs[0].nbytes <= limits.leader
            return Agree.LEADERS, Move.LEADERS if small else Move.PIPELINED
        if call.op in _BARRIERS or call.count != ANY_COUNT and call.count * call.dtype.item_bytes <= limits.flat:
            return agree, Move.FLAT
    elif call.op in _BARRIERS:
        return agree, Move.NOTHING
    return agree, Move.TWO_LEVEL
