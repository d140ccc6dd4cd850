"""The sizes that a group's shared memory is made with, what of it is taken at once, and what is left of it where its
ranks do not all come."""

import os
import re
from ctypes import c_void_p
from pathlib import Path

import pytest

from c10d_custom.config import Config
from c10d_custom.creation import Processes
from c10d_custom.creation.local_datagrams import Letters, Mailbox, Neighbours
from c10d_custom.errors import PeerLostError, TransportError
from c10d_custom.native import Interrupted, lib
from c10d_custom.transport.shm import segment
from c10d_custom.transport.shm.segment import at_once, geometry

ROWS = "its ranks on the host", "MiB when it is made"  # of docs/sharp-bits.md


@pytest.mark.parametrize("many", [2, 64, 65, 100, 4096])
def test_a_block_has_a_line_for_each_rank(many):
    made = geometry(Config(block_bytes=4096), many, 0)
    assert made.block_bytes % 4096 == 0 and made.block_bytes // many >= 64
    assert made.block_bytes < 4096 + 64 * many, "no more than it takes"


@pytest.mark.parametrize("many", [16, 48, 64, 192, 256])
@pytest.mark.parametrize("cache", [32 << 20, 210 << 20, 768 << 20])
def test_all_rings_together_fit_half_the_cache(many, cache):
    window, block = segment._rings(Config(), many, lambda ranks: cache)
    assert window * block <= max(cache // 2 // many, 4 * -(-64 * many // 4096) * 4096)
    assert 4 <= window <= 8 and block % 4096 == 0 and 64 * many <= block <= 128 << 10
    with_one_more = (window + 1) * block if window < 8 else window * (block + 4096)
    assert (window, block) == (8, 128 << 10) or with_one_more > cache // 2 // many, "no less than fits"


def test_rings_are_as_configured_where_they_fit_anyway_or_nothing_is_known():
    assert segment._rings(Config(), 8, lambda ranks: 1 << 20) == (8, 128 << 10)
    assert segment._rings(Config(), 192, lambda ranks: 0) == (8, 128 << 10)
    assert segment._rings(Config(window=3), 192, lambda ranks: 1 << 20) == (3, 128 << 10), "as somebody has said"


def test_sums_are_shared_out_where_each_rank_has_a_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert [segment._two_steps(n) for n in (2, 3, 4, 16)] == [0, 0, 4096, 4096]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert segment._two_steps(64) == 4096, "bound to a core each"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert [segment._two_steps(n) for n in (2, 8, 64, 192)] == [0, 65536, 8192, 4096]


def test_rings_take_no_memory_before_they_are_used():
    fd = segment._create(Config(), 4)
    try:
        assert os.fstat(fd).st_blocks * 512 < at_once(geometry(Config(), 4, 0)) / 8
    finally:
        os.close(fd)


def test_a_group_takes_what_the_docs_say_when_it_is_made():
    text = (Path(__file__).parents[2] / "docs" / "sharp-bits.md").read_text()
    ranks, said = (
        [float(cell) for cell in re.findall(r"\| ([\d.]+)", text.split(row)[1].split("\n")[0])] for row in ROWS
    )
    assert len(ranks) == len(said) == 6
    for many, mib in zip(map(int, ranks), said):
        fd = segment._create(Config(), many)
        takes = os.fstat(fd).st_blocks * 512 + (4096 * many if many >= 16 else 0)  # a page each, as they join
        os.close(fd)
        assert mib == pytest.approx(takes / 2**20, rel=0.03, abs=0.01), (many, takes)


class Ctrl(BaseException):
    """Of a signal handler."""


@pytest.mark.parametrize(
    "raised, dies, error, text",
    [
        pytest.param(
            RuntimeError("Broken pipe"), False, TransportError, "the store does not answer.*Broken pipe", id="store"
        ),
        pytest.param(RuntimeError("Broken pipe"), True, PeerLostError, "rank 1 has died.*Broken pipe", id="death"),
        pytest.param(Ctrl(), False, Ctrl, None, id="handler"),
    ],
)
def test_a_wait_for_the_others_that_ends_leaves_no_segment(raised, dies, error, text):
    def held():
        with open("/proc/self/maps") as maps:
            return sum("memfd:c10d_custom" in line for line in maps), len(os.listdir("/proc/self/fd"))

    mapped = []

    class Others(Processes):
        def obituary(self):
            return "rank 1 has died" if dies and mapped else ""  # it served the store, and that is heard of first

    def look():
        mapped.append(held()[0])
        raise raised

    boxes = [Mailbox(), Mailbox()]
    try:
        neighbours = Neighbours(boxes[0], [box.name for box in boxes])
        letters = Letters(neighbours, [0, 1], 0, "g", 30, Others(), look, set)
        before, at = held(), (c_void_p * 1)()
        with pytest.raises(error, match=text):
            segment.open_segment(letters, Config(), Interrupted(), 0, at)
        assert mapped == [before[0] + 1], "it was there"
        for letter in boxes[1]._letters:
            os.close(letter[1].descriptor)
        assert held() == before
    finally:
        for box in boxes:
            box.close()
    lib.c10d_free(at[0])
