"""How many cache lines move between cores in one call on one host, near and far, as backend/shm does it: computed from
the protocol for any number of ranks, size and machine, beside what must move at least. docs/internals/cost-model.md has
its table; backend/tests/access_count_test.cpp counts the same lines in the core itself.

A line moves when a rank reads what another has written since it last looked. A rank that looks again at what it has in
its cache moves nothing; nor do the lines that only a wait writes and reads (which core who waits sits on, and whom to
wake). What a rank writes stays where it is until it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from c10d_custom.config import Config

LINE = 64
OPERATIONS = "barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
DISTANCES = "same cache", "same socket", "other socket"
_CONFIG = Config()


@dataclass(frozen=True)
class Host:
    """``cache``, ``socket``: how many cores share a last-level cache, and a socket. Rank r sits on core r."""

    cache: int
    socket: int

    def distance(self, a: int, b: int) -> int:
        """An index of DISTANCES."""
        return 0 if a // self.cache == b // self.cache else 1 if a // self.socket == b // self.socket else 2


@dataclass(frozen=True)
class Protocol:
    """How calls are made: what a change of backend/shm changes here."""

    name: str
    # Announcements: each rank reads two lines (that it has come, and its fingerprint) of every other, below so many
    # ranks; from there on by the combining tree.
    tree_from: int | None
    # Of reductions that travel with the announcement, from so many bytes on each rank of more than 3 reduces one part
    # for all, which takes one more meeting; below, and in all where this is None, everyone reads all inputs.
    parts_from: int | None
    fan_in: int = 8
    small_bytes: int = _CONFIG.small_bytes  # the largest input that travels with the announcement
    block_bytes: int = _CONFIG.block_bytes
    pair_pieces: int = 8  # all_to_all: pieces that a pair's bytes are cut into, at most

    def has_tree(self, n: int) -> bool:
        return self.tree_from is not None and n >= self.tree_from


FLAT = Protocol("each looks at each", None, None)  # for comparison
CURRENT = Protocol("as it is", 16, 4096)  # the one that the core has: access_count_test holds it to this


@dataclass(frozen=True)
class Lines:
    """That one rank reads of another. ``control``: at most, where every look finds something new; ``least``: at least,
    where one look serves two calls or several blocks, as the other is ahead."""

    least: float
    control: float
    data: int

    def __add__(self, more: Lines) -> Lines:
        return Lines(self.least + more.least, self.control + more.control, self.data + more.data)


_NOTHING = Lines(0, 0, 0)


def _lines(nbytes: float) -> int:
    return int(-(-nbytes // LINE))


def _meeting(protocol: Protocol, n: int, reader: int, writer: int, agrees: bool) -> Lines:
    """``agrees``: fingerprints are compared, too."""
    if not protocol.has_tree(n):
        return Lines(1 + 0.5, 2, 0) if agrees else Lines(0.5, 1, 0)
    # Any rank may be the last at a counter of the tree, and so the one that goes on from it: here the first of its
    # branch. The word that all have come is then rank 0's.
    lines = Lines(1, 1, 0) if writer == 0 else _NOTHING
    stride, width = 1, n
    while width > 1 and reader % stride == 0:
        first = reader // (stride * protocol.fan_in) * protocol.fan_in * stride
        branches = min(protocol.fan_in, width - first // stride)
        before = (reader // stride - first // stride - 1) % branches * stride + first
        if branches > 1 and writer == before:
            # The counter, from who came before; but the first may have been the last of the round before.
            lines += Lines(0 if reader == first else 1, 1, 0)
        if agrees and reader == first and first < writer < first + branches * stride and writer % stride == 0:
            lines += Lines(1, 1, 0)
        stride, width = stride * protocol.fan_in, -(-width // protocol.fan_in)
    return lines


def between(protocol: Protocol, operation: str, nbytes: int, n: int, reader: int, writer: int) -> Lines:
    """What ``reader`` reads of ``writer`` in one call of ``operation``, of ``nbytes`` in its largest buffer."""
    part = nbytes // n
    announced = _meeting(protocol, n, reader, writer, operation != "all_to_all" or not protocol.has_tree(n))
    own = nbytes if operation in ("all_reduce", "reduce_scatter", "all_to_all") else part
    if operation == "barrier":
        return announced
    if operation == "all_to_all":
        if protocol.has_tree(n):
            # Each looks at all: whether they have come, at their fingerprints, at what their tables say of it; then all
            # meet again.
            announced += Lines(1 + 2, 2 + 3, 0) + _meeting(protocol, n, reader, writer, False)
        else:
            table = _lines(24 * n) + 1  # it may begin amid a line
            announced += Lines(min(table, 16 * n / LINE), table, 0)  # tables of two calls may lie in one line
        if nbytes > protocol.small_bytes:
            # What is written, what is taken, whether there is memory, whether it sleeps.
            announced += Lines(2 * 0.5, 2 * protocol.pair_pieces + 2, 0)
        return announced + Lines(0, 0, _lines(part))
    if own <= protocol.small_bytes:
        if operation == "all_reduce" and protocol.parts_from is not None and nbytes >= protocol.parts_from and n > 3:
            parts = sum(_of_parts(nbytes, 1, n, rank) for rank in (reader, writer))
            return announced + _meeting(protocol, n, reader, writer, False) + Lines(0, 0, parts)
        return announced + Lines(0, 0, _lines(nbytes if operation == "all_reduce" else part))
    # Through the rings, block by block.
    chunk = protocol.block_bytes
    if operation == "reduce_scatter":
        chunk = protocol.block_bytes // (n - 1) // LINE * LINE
    blocks = -(-(nbytes if operation == "all_reduce" else part) // chunk)
    signals = 3 if operation == "all_reduce" and n > 2 else 2  # filled, reduced, read
    data = _lines(nbytes) if operation == "all_reduce" and n == 2 else _lines(part)
    if operation == "all_reduce" and n > 2:
        data = sum(_of_parts(nbytes, blocks, n, rank) for rank in (reader, writer))
    return announced + Lines(signals * 0.5, signals * blocks, data)


@functools.cache
def _of_parts(nbytes: int, blocks: int, n: int, rank: int) -> int:
    """Lines of one rank's part of all blocks, which are of equal length."""
    longest = -(-nbytes // blocks)
    even = -(-longest // LINE) * LINE
    total = 0
    for block in range(blocks):
        lines = _lines(min(nbytes, (block + 1) * even) - min(nbytes, block * even))
        total += lines * (rank + 1) // n - lines * rank // n
    return total


def pairs(n: int) -> Iterator[tuple[int, int]]:
    return ((reader, writer) for reader in range(n) for writer in range(n) if reader != writer)


def total(protocol: Protocol, operation: str, nbytes: int, n: int) -> Lines:
    """Over all ranks."""
    every = _NOTHING
    for reader, writer in pairs(n):
        every += between(protocol, operation, nbytes, n, reader, writer)
    return every


def by_distance(protocol: Protocol, operation: str, nbytes: int, n: int, host: Host) -> tuple[list[float], float]:
    """(lines over all ranks by DISTANCES, those of the rank that reads most)"""
    far, each = [0.0, 0.0, 0.0], [0.0] * n
    for reader, writer in pairs(n):
        lines = between(protocol, operation, nbytes, n, reader, writer)
        far[host.distance(reader, writer)] += lines.control + lines.data
        each[reader] += lines.control + lines.data
    return far, max(each)


def least(operation: str, nbytes: int, n: int) -> int:
    """Lines over all ranks that no protocol can do without: each rank is heard of and hears, and what it gives and gets
    is read once."""
    part = nbytes // n
    if operation == "barrier":
        return 2 * (n - 1)
    if operation == "all_reduce":
        return 2 * (n - 1) * _lines(nbytes)
    if operation == "reduce_scatter":
        return (n - 1) * _lines(nbytes)
    return n * (n - 1) * _lines(part)  # all_gather, all_to_all


# What access_count_test counts: ranks, operation, bytes.
_COUNTED = (
    *((n, "barrier", 0) for n in (2, 4, 8, 16)),
    *((n, "all_reduce", nbytes) for n in (2, 4, 8, 16) for nbytes in (4, 4096, 16384, 262144)),
    *((n, "all_reduce", 1 << 20) for n in (2, 4)),
    *((n, operation, nbytes) for n in (2, 4, 8, 16) for operation in OPERATIONS[2:] for nbytes in (4096, 1 << 20)),
)
_NAMES = {
    "barrier": "kBarrier",
    "all_reduce": "kAllReduce",
    "all_gather": "kAllGather",
    "reduce_scatter": "kReduceScatter",
    "all_to_all": "kAllToAll",
}


def expected() -> str:
    """backend/tests/access_count_expected.inc."""
    rows = ["// Generated by scripts/doc_tables.py from scripts/bench/lines.py.", "/* clang-format off */"]
    for n, operation, nbytes in _COUNTED:
        every = total(CURRENT, operation, nbytes, n)
        rows.append(f"{{{n}, {_NAMES[operation]}, {nbytes}, {int(every.least)}, {int(every.control)}, {every.data}}},")
    return "\n".join(rows) + "\n"


_TABLE_HOST = Host(8, 128)
_RANKS = 2, 8, 16, 64, 192, 256
_SIZES = (4, "4 B"), (4096, "4 KB"), (65536, "64 KB"), (1 << 20, "1 MB"), (32 << 20, "32 MB")


def _short(number: float) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:g}"


HEAD = ["bytes", "ranks", "protocol", *DISTANCES, "of the busiest rank", "at least"]


def rows() -> list[list[str]]:
    """Of the table in docs/internals/cost-model.md: all_reduce on the host of _TABLE_HOST."""
    made = []
    for nbytes, size in _SIZES:
        for n in _RANKS:
            before = None
            for protocol in (FLAT, CURRENT):
                far, most = by_distance(protocol, "all_reduce", nbytes, n, _TABLE_HOST)
                now = [*map(_short, far), _short(most)]
                if now != before:
                    made.append([size, str(n), protocol.name, *now, _short(least("all_reduce", nbytes, n))])
                before = before or now
    return made
