"""The model of cache lines that move between cores, against what can be said without it; the core itself is counted by
backend/tests/access_count_test.cpp."""

import pytest

from bench import lines

HOST = lines.Host(cache=8, socket=32)


@pytest.mark.parametrize("protocol", [lines.TODAY, lines.PLANNED], ids=lambda p: p.name)
@pytest.mark.parametrize("operation", lines.OPERATIONS)
def test_nothing_moves_less_than_it_must(protocol, operation):
    for n in (2, 3, 8, 16, 40):
        for nbytes in (0,) if operation == "barrier" else (64 * n, 4096 * n, (1 << 20) // n * n):
            far, most = lines.by_distance(protocol, operation, nbytes, n, HOST)
            every = lines.total(protocol, operation, nbytes, n, HOST)
            assert sum(far) == every.control + every.data
            assert every.least <= every.control
            assert every.least + every.data >= lines.least(operation, nbytes, n) - 2 * (n - 1)
            assert sum(far) / n <= most <= sum(far)


def test_today_every_rank_reads_every_other():
    for n in (2, 8, 32):
        every = lines.total(lines.TODAY, "all_reduce", 4096, n, HOST)
        assert (every.control, every.data) == (2 * n * (n - 1), 64 * n * (n - 1))


def test_large_reductions_move_what_they_must_whatever_the_number_of_ranks():
    for n in (3, 8, 16):
        every = lines.total(lines.TODAY, "all_reduce", 1 << 20, n, HOST)
        assert every.data == lines.least("all_reduce", 1 << 20, n)


def test_near_is_near():
    assert [HOST.distance(0, r) for r in (1, 7, 8, 31, 32)] == [0, 0, 1, 1, 2]
    far, _ = lines.by_distance(lines.TODAY, "barrier", 0, 8, HOST)
    assert far[1:] == [0, 0]
    # In two levels only first ranks look beyond their cache.
    reading = {
        reader
        for reader, writer in lines.pairs(64)
        if HOST.distance(reader, writer)
        and lines.between(lines.PLANNED, "barrier", 0, 64, HOST, reader, writer) != lines.Lines(0, 0, 0)
    }
    assert reading == {0, 8, 16, 24, 32, 40, 48, 56}
