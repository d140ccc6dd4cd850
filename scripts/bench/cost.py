"""What each collective moves and how often it synchronises on one host, as backend/shm does it.
docs/internals/cost-model.md derives it.

Bytes count once where they are read and once where they are written. Private: a rank's own input and output, as far as
they come from memory. Ring: shared slots and blocks, which stay in the caches, and input read again while it is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from c10d_custom.config import Config

_CONFIG = Config()
CELL = _CONFIG.cell_bytes


@dataclass(frozen=True)
class Moved:
    """By one rank, in one call."""

    private: float
    ring: float


@dataclass(frozen=True)
class Cost:
    busiest: Moved  # the root, or any rank where all do the same
    other: Moved
    others: int  # ranks that do what `other` says; the rest do what the busiest does
    blocks: int  # that pass through a ring (all_to_all: a pair's) one after the other; 0: the small slots
    syncs: int  # a rank's waits for all others, for each block

    def total(self, size: int) -> Moved:
        return Moved(
            *(
                self.others * getattr(self.other, k) + (size - self.others) * getattr(self.busiest, k)
                for k in ("private", "ring")
            )
        )


def _alike(private: float, ring: float, blocks: int = 0, syncs: int = 1) -> Cost:
    return Cost(Moved(private, ring), Moved(0, 0), 0, blocks, syncs)


def _rooted(size: int, root: tuple[float, float], other: tuple[float, float], blocks: int = 0, syncs: int = 1) -> Cost:
    return Cost(Moved(*root), Moved(*other), size - 1, blocks, syncs)


def _blocks(nbytes: float, block: int) -> int:
    return int(-(-nbytes // block))


def cost(operation: str, nbytes: int, n: int, config: Config = _CONFIG) -> Cost:
    """Of ``operation`` with ``nbytes`` in its largest buffer, on ``n`` >= 2 ranks of a host."""
    S, s, small, block = nbytes, nbytes / n, config.small_bytes, config.block_bytes
    pair_bytes = block // (n - 1) // 64 * 64  # of a block that carries other bytes for each rank
    rest = S - s
    half: tuple[float, float]
    all_of_it: tuple[float, float]
    if operation in ("all_reduce", "reduce"):
        if S <= small:
            all_of_it, half = (2 * S, S + n * S), (S, S)
            blocks, syncs = 0, 1
        elif n == 2:
            all_of_it, half = (2 * S, 3 * S if operation == "all_reduce" else S), (S, S)
            blocks, syncs = _blocks(S, block), 1
        else:
            all_of_it, half = (2 * S, 3 * S - s), (S, 2 * rest + s)
            blocks, syncs = _blocks(S, block), 2
        return (
            _alike(all_of_it[0], all_of_it[1], blocks, syncs)
            if operation == "all_reduce"
            else _rooted(n, all_of_it, half, blocks, syncs)
        )
    if operation == "broadcast":
        return _alike(S, S, _blocks(S, block) if S > small else 0)
    if operation == "all_gather":
        return _alike(S + s, S + s, _blocks(s, block) if s > small else 0)
    if operation == "reduce_scatter":
        return _alike(S + s, 2 * rest, _blocks(s, pair_bytes)) if S > small else _alike(S + s, 2 * S)
    if operation == "all_to_all":
        # A pair's ring has room for four times that; half of it passes at once, where ranks outnumber cores.
        piece = 2 * pair_bytes * config.window
        return _alike(2 * S, 2 * rest, _blocks(s, piece)) if S > small else _alike(2 * S, 2 * S)
    if operation == "gather":
        if s > small:
            return _rooted(n, (S + s, rest), (s, s), _blocks(s, block))
        return _rooted(n, (S + s, S + s), (s, s))
    if operation == "scatter":
        if S > small:
            return _rooted(n, (S + s, rest), (s, s), _blocks(s, block))
        return _rooted(n, (S + s, S + s), (s, s))
    if operation == "send_recv":  # there and back; the ranks between do nothing
        return Cost(Moved(2 * S, 2 * S), Moved(0, 0), n - 2, 2 * _blocks(S, CELL), 1)
    raise KeyError(operation)
