"""Whether the parts of an uneven collective fit each other, told by a number of each rank.

A part has two sizes: what the rank gives that it comes from, and what the rank expects that it goes to. Each ordered
pair of ranks has a weight, as if drawn by lot. The balance of a rank is the weighted sum of what it gives, less that of
what it expects, modulo a prime. All balances together are 0 where all parts fit, for each is in there once with either
sign; where one does not, they are 0 with a probability of 2^-127. So 16 bytes in a rank's header (flat_exchange.py)
tell all ranks the same, however many they are and whoever the part is between. Which sizes they are, the ranks tell
each other when they make the error (error_text.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache
from hashlib import blake2b
from operator import mul
from typing import TYPE_CHECKING

from ...call import SHAPES, Op
from ..disagreement import moves, sizes_of

if TYPE_CHECKING:
    from ...call import Call


BALANCE_BYTES = 16
_PRIME = 2**127 - 1


@lru_cache(1 << 12)
def _weight(giver: int, taker: int) -> int:
    return int.from_bytes(blake2b(b"%d to %d" % (giver, taker), digest_size=BALANCE_BYTES).digest(), "little") % _PRIME


def fit(balances: Iterable[bytes | memoryview]) -> bool:
    """Whether all parts fit, of which these are the balances, or sums of some."""
    return sum(int.from_bytes(b, "little") for b in balances) % _PRIME == 0


def of_part(op: int, root: int, rank: int, nbytes: int) -> bytes:
    """The balance of a rank that is not the root, where that one alone has a part for each rank."""
    balance = nbytes * (-_weight(root, rank) if SHAPES[Op(op)].from_each else _weight(rank, root))
    return (balance % _PRIME).to_bytes(BALANCE_BYTES, "little")


def together(balances: Iterable[bytes | memoryview]) -> bytes:
    """The sum of several ranks' balances."""
    return (sum(int.from_bytes(b, "little") for b in balances) % _PRIME).to_bytes(BALANCE_BYTES, "little")


class Balances:
    """The balances of the calls of one rank of a group of ``size``."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @cached_property
    def _weights(self) -> tuple[list[int], list[int]]:
        """The weights of what this rank gives to each rank, and of what it gets from each."""
        me, ranks = self.rank, range(self.size)
        return [_weight(me, r) for r in ranks], [_weight(r, me) for r in ranks]

    def of(self, call: Call) -> bytes:
        me, root = self.rank, call.root
        gives, gets = sizes_of(call, self.size)
        if root >= 0:
            gives = [n if moves(call.op, root, me, r) else 0 for r, n in enumerate(gives)]
            gets = [n if moves(call.op, root, r, me) else 0 for r, n in enumerate(gets)]
        given, got = self._weights
        balance = sum(map(mul, given, gives)) - sum(map(mul, got, gets))
        return (balance % _PRIME).to_bytes(BALANCE_BYTES, "little")
