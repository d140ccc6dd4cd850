"""How the ranks of a group lie on hosts, and the order that reductions follow from it.

Order of a reduction over several hosts: inside each host, its ranks in the order of their group ranks,
the host's result rounded to the dtype, for only that crosses the network, and not its wider accumulators;
then between hosts, in the order of their first ranks. It does not depend on sizes or algorithms. AVG of
floating-point numbers is divided inside the hosts (so that no intermediate sum overflows), of integers at
the end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_double
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...creation.topology import by_host
from ...dtypes import AVG, PREMUL_SUM, SUM

if TYPE_CHECKING:
    from ctypes import Array

    from ...creation.topology import Location
    from ...dtypes import DType


@dataclass(frozen=True)
class Hosts:
    """Seen from one rank. ``ranks``: the group ranks of each host, both in rising order; ``mine``: the
    index of this rank's host; ``local``: this rank's index in it; ``carriers``: how many ranks of every
    host carry its traffic, the first ones."""

    rank: int
    ranks: list[list[int]]
    mine: int
    local: int
    carriers: int

    @classmethod
    def of(cls, locations: Sequence[Location], rank: int) -> Hosts:
        ranks = sorted(by_host(locations).values())
        mine = next(h for h, members in enumerate(ranks) if rank in members)
        return cls(rank, ranks, mine, ranks[mine].index(rank), min(map(len, ranks)))

    @property
    def here(self) -> list[int]:
        """The ranks of this host."""
        return self.ranks[self.mine]

    @property
    def others(self) -> list[int]:
        """The indices of the other hosts."""
        return [h for h in range(len(self.ranks)) if h != self.mine]

    def of_rank(self, rank: int) -> tuple[int, int]:
        """(host, index in it) of a rank."""
        for h, members in enumerate(self.ranks):
            if rank in members:
                return h, members.index(rank)
        raise ValueError(rank)

    def partner(self, host: int, index: int) -> int:
        """The rank of ``host`` that deals with the rank of index ``index`` on another host."""
        return self.ranks[host][index % len(self.ranks[host])]


@dataclass(frozen=True)
class Step:
    """A reduce op, and what its kernel divides by (None: nothing). PREMUL_SUM takes the ranks' own factors."""

    redop: int
    divisor: float | None = None

    @property
    def factors(self) -> Array[c_double] | None:
        return None if self.divisor is None else _double(self.divisor)


@functools.cache
def _double(value: float) -> Array[c_double]:
    return (c_double * 1)(value)


@dataclass(frozen=True)
class Reduction:
    """The two steps of a reduction over ``size`` ranks."""

    inside: Step
    between: Step

    @classmethod
    @functools.cache
    def of(cls, dtype: DType, redop: int, size: int) -> Reduction:
        if redop == AVG:
            whole = dtype.name.startswith(("int", "uint"))
            return cls(Step(SUM), Step(AVG, float(size))) if whole else cls(Step(AVG, float(size)), Step(SUM))
        if redop == PREMUL_SUM:
            return cls(Step(PREMUL_SUM), Step(SUM))
        return cls(Step(redop), Step(redop))
