"""The sizes of a group's segment, and the numbers by which its ranks choose the way of each collective
(backend/shm/algorithm.cpp). Rank 0 decides them; the others read them."""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import CDLL, c_uint64
from typing import TYPE_CHECKING

from ...config import ALGORITHMS
from ...native import Geometry, lib

if TYPE_CHECKING:
    from ...config import Config

_ARENAS = 4 << 40  # bytes: a group's, of all ranks. A rank that uses them needs as many addresses
_PAGE, _LARGE_PAGE = 4096, 2 << 20
_RLIMIT_FSIZE, _NO_LIMIT = 1, 2**64 - 1
_FAN_IN = 8  # branches of a counter of the combining tree: as many cores as mostly share a cache
# Bytes of a reduction that is shared out: shorter ones gain less than another synchronisation costs, and where ranks
# outnumber cores and it costs turns on them, those of all ranks together.
_TWO_STEPS, _TWO_STEPS_OF_ALL = 4096, 512 << 10
_FEW = 3  # ranks: of these, each rank may as well read everyone's input
_LOOKED_AT = 8 << 20  # bytes of all rings together: as many as any machine's last-level cache holds
_FEWEST_BLOCKS = 4  # in a ring: one is filled, one reduced, one drained, and one is on its way between two of these
_IN_PLACE = 16 << 10  # bytes of a part that only one rank reads; measured at 2 and 4 ranks


def geometry(config: Config, ranks: int, board_bytes: int) -> Geometry:
    # Pairs grow with the square of the group: keep their sum within what 8 ranks take.
    cells = max(4, min(config.cells, config.cells * 64 // (ranks * ranks)))
    window, block = _rings(config, ranks, lib.c10d_group_cache_bytes)
    return Geometry(
        ranks=ranks,
        window=window,
        block_bytes=block,
        small_bytes=config.small_bytes,
        cell_bytes=config.cell_bytes,
        cells=cells,
        board_bytes=board_bytes,
        arena_bytes=_arena(ranks),
        fan_in=_FAN_IN if ranks >= config.tree_ranks else 0,
        two_steps_bytes=_two_steps(ranks),
        in_place_bytes=_IN_PLACE,
        forced=ALGORITHMS.index(config.algorithm),
    )


def _rings(config: Config, ranks: int, cache_bytes: Callable[[int], int]) -> tuple[int, int]:
    """(blocks in a ring, bytes of a block): as configured, or less, for all rings together to fit into half of the
    ranks' last-level caches; the other half is for the tensors."""
    # Operations cut a block among the ranks, at cache lines.
    least = -(-64 * ranks // _PAGE) * _PAGE
    window, block = config.window, max(config.block_bytes, least)
    if ranks * window * block > _LOOKED_AT and (cache := cache_bytes(ranks)):
        ring = cache // 2 // ranks
        # Fewer blocks rather than shorter ones: each costs all ranks a synchronisation.
        window = min(window, max(_FEWEST_BLOCKS, ring // block))
        block = max(least, min(block, ring // window // _PAGE * _PAGE))
    return window, block


def _two_steps(ranks: int) -> int:
    if ranks <= _FEW:
        return 0
    mask = len(os.sched_getaffinity(0))
    cores = mask if mask > 1 else os.cpu_count() or 1  # a launcher has given each rank a core
    return _TWO_STEPS if ranks <= cores else max(_TWO_STEPS, _TWO_STEPS_OF_ALL // ranks)


def at_once(made: Geometry) -> int:
    """How many bytes of a segment collectives take, but large all_to_alls: a few of them when it is made, the rings
    with the first large one. Pair rings and cells come on top."""
    for_each = made.window * made.block_bytes + 2 * made.small_bytes
    return int(made.ranks * for_each + (made.ranks + 1) * made.board_bytes)


def _arena(ranks: int) -> int:
    """Bytes of one rank's arena: of the segment's length, not of memory."""
    if ranks == 1 or not _files_may_be_large():
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # The C library says anything where a sandbox refuses sysinfo.
    return max(0, min(memory, _ARENAS // ranks)) // _LARGE_PAGE * _LARGE_PAGE


def _files_may_be_large() -> bool:
    """Whether no limit is set to the length of this process's files. Asked without the module `resource`, which takes
    its time to be imported."""
    limits = (c_uint64 * 2)()
    return CDLL(None).getrlimit(_RLIMIT_FSIZE, limits) == 0 and limits[0] == _NO_LIMIT
