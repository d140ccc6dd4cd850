"""How large a group's segment is, with the numbers by which its ranks choose the way of each collective
(backend/shm/algorithm.cpp), which rank 0 decides and the others read; and how the ranks of one host come to hold it.

Rank 0 creates a memfd, which has no name in any file system and vanishes with its last holder (where a sandbox refuses
that call, a file of /dev/shm that never has a name), and hands it to each rank in a letter
(creation/local_datagrams.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_uint64
from typing import TYPE_CHECKING, Any

from ...config import ALGORITHMS, SETTINGS
from ...errors import DOCTOR, TransportError
from ...native import Geometry, lib, memory_left

if TYPE_CHECKING:
    from ...config import Config
    from ...creation.local_datagrams import Letters


_ARENAS = 4 << 40  # bytes: a group's, of all ranks. A rank that uses them needs as many addresses
_PAGE, _LARGE_PAGE = 4096, 2 << 20
_RLIMIT_FSIZE, _NO_LIMIT = 1, 2**64 - 1
_FAN_IN = 8  # branches of a counter of the combining tree: as many cores as mostly share a cache
# From how many bytes on a reduction is shared out among the ranks, which takes one more synchronisation. Where each
# rank has a core: of one rank's tensor. Where ranks outnumber cores they must wait for their turns, and it takes more:
# of the tensors of all ranks together.
_TWO_STEPS, _TWO_STEPS_OF_ALL = 4096, 512 << 10
_FEW = 3  # ranks: of these, each rank may as well read everyone's input
_LOOKED_AT = 8 << 20  # bytes of all rings together: as many as any machine's last-level cache holds
_FEWEST_BLOCKS = 4  # in a ring: one is filled, one reduced, one drained, and one is on its way between two of these
_IN_PLACE = 16 << 10  # bytes of an input, for each rank: from there on read where it lies; measured at 2 and 4 ranks
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def geometry(config: Config, ranks: int, call_slot_bytes: int) -> Geometry:
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
        call_slot_bytes=call_slot_bytes,
        arena_bytes=_arena(ranks),
        fan_in=_FAN_IN if ranks >= config.tree_ranks else 0,
        two_steps_bytes=_two_steps(ranks),
        in_place_bytes=_IN_PLACE,
        forced=ALGORITHMS.index(config.algorithm),
    )


def _rings(config: Config, ranks: int, cache_bytes: Callable[[int], int]) -> tuple[int, int]:
    """(blocks in a ring, bytes of a block): as configured; but where nothing is, perhaps less, for all rings together
    to fit into half of the ranks' last-level caches. The other half is for the tensors."""
    # Operations cut a block among the ranks, at cache lines.
    least = -(-64 * ranks // _PAGE) * _PAGE
    window, block = config.window, max(config.block_bytes, least)
    by_default = all(getattr(config, name) == SETTINGS[name].default for name in ("window", "block_bytes"))
    if by_default and ranks * window * block > _LOOKED_AT and (cache := cache_bytes(ranks)):
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
    return int(made.ranks * for_each + (made.ranks + 1) * made.call_slot_bytes)


def _arena(ranks: int) -> int:
    """Bytes of one rank's arena: of the segment's length, not of memory."""
    if ranks == 1 or _longest_file() != _NO_LIMIT:
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # The C library says anything where a sandbox refuses sysinfo.
    return max(0, min(memory, _ARENAS // ranks)) // _LARGE_PAGE * _LARGE_PAGE


def _longest_file() -> int:
    """Bytes that a file of this process may have; 0: not known. Asked without the module `resource`, which takes its
    time to be imported."""
    limits = (c_uint64 * 2)()
    return limits[0] if CDLL(None).getrlimit(_RLIMIT_FSIZE, limits) == 0 else 0


# SegmentCall of backend/shm/api.h
_CALLS = ("memfd_create", "fchmod", "ftruncate", "fallocate", "fcntl(F_ADD_SEALS)", "mmap")


def open_segment(letters: Letters, config: Config, interrupted: Any, call_slot_bytes: int, at: Any) -> None:
    """Puts the native group of this rank into ``at``, an array of one pointer, whose owner frees it; it is closed where
    this raises. Any rank's failure is raised by all. ``interrupted``: see c10d_open; ``call_slot_bytes``: of
    each of its call slots."""
    with contextlib.closing(_Descriptor(-1)) as own:
        failure = _shared(letters, own, lambda: _create(config, letters.size, call_slot_bytes))
        try:
            if failure is None:
                try:
                    fd = own.take()
                    _open(_unshrinkable(fd) if letters.rank else fd, letters.rank, config, interrupted, at)
                except (OSError, TransportError) as error:
                    failure = f"rank {letters.rank} cannot map the group's shared memory: {error}"
            letters.gather_and_decide("mapped", failure, _all_well)
        except BaseException:
            if at[0]:
                lib.c10d_close(at[0])
            raise


class _Descriptor:
    """A descriptor that is closed at the end, if nobody has taken it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def take(self) -> int:
        number, self.number = self.number, -1
        return number

    def close(self) -> None:
        if self.number >= 0:
            os.close(self.take())


def _shared(letters: Letters, own: _Descriptor, create: Callable[[], int]) -> str | None:
    """Why there is no segment, on all ranks alike; else each has a descriptor of it in ``own``."""
    failure: str | None = None
    if letters.rank:
        letter = letters.take("segment")
        own.number = -1 if letter.descriptor is None else letter.descriptor
        failure = letter.value
    else:
        try:
            own.number = create()
        except (OSError, TransportError) as error:
            failure = f"rank 0 cannot create shared memory: {error}"
        letters.hand_out("segment", failure, own.number if failure is None else None)
    return failure


def _all_well(failures: Sequence[str | None]) -> None:
    said = list(dict.fromkeys(f for f in failures if f))
    if said:
        raise TransportError(f"{'; '.join(said)} ({DOCTOR})")


def _create(config: Config, size: int, call_slot_bytes: int = 0) -> int:
    wanted = geometry(config, size, call_slot_bytes)
    takes = at_once(wanted)
    free, whose = memory_left(takes)
    if takes > free:
        # Beyond a cgroup's limit the kernel would kill instead of saying no.
        raise TransportError(
            f"it takes {takes >> 10} KiB, and {whose} has {max(free, 0) >> 10} KiB left. C10D_CUSTOM_WINDOW "
            "and C10D_CUSTOM_BLOCK_BYTES make it smaller."
        )
    total = c_uint64()
    fd = lib.c10d_segment_create(byref(wanted), byref(total))
    if fd < 0:
        why = f"{_CALLS[total.value]}: {os.strerror(-fd)}"
        if -fd == errno.EFBIG and (longest := _longest_file()) != _NO_LIMIT:
            why += f"; this process may have no file, nor memory to share, of more than {longest >> 10} KiB (ulimit -f)"
        raise OSError(-fd, why)
    return fd


def _unshrinkable(fd: int) -> int:
    """``fd``, as it came: -1 if it did not."""
    if fd < 0:
        raise TransportError("this process could not take the segment: has it too many files open (ulimit -n)?")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS and not _nameless(fd):
        os.close(fd)
        raise TransportError("what came as the segment can shrink")
    os.set_inheritable(fd, False)
    return fd


def _nameless(fd: int) -> bool:
    """Whether this is what rank 0 creates where memfd_create is refused: only this user's processes can shrink it."""
    file = os.fstat(fd)
    mine = file.st_uid == os.geteuid() and file.st_nlink == 0 and stat.S_IMODE(file.st_mode) == 0o600
    return mine and stat.S_ISREG(file.st_mode) and fcntl.fcntl(fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SEAL


def _open(fd: int, rank: int, config: Config, interrupted: Any, at: Any) -> None:
    if config.cool:
        lib.c10d_stay_cool(1)
    if error := lib.c10d_open(fd, rank, config.spin_us * 1000, interrupted, at):
        raise OSError(error, os.strerror(error))
