"""The model of cache lines that move between cores, against what can be said without it; the core itself is counted by
backend/tests/access_count_test.cpp."""

import pytest

from bench import lines

HOST = lines.Host(cache=8, socket=32)


@pytest.mark.parametrize("protocol", [lines.FLAT, lines.CURRENT], ids=lambda p: p.name)
@pytest.mark.parametrize("operation", lines.OPERATIONS)
def test_nothing_moves_less_than_it_must(protocol, operation):
    for n in (2, 3, 8, 16, 40):
        for nbytes in (0,) if operation == "barrier" else (64 * n, 4096 * n, (1 << 20) // n * n):
            far, most = lines.by_distance(protocol, operation, nbytes, n, HOST)
            every = lines.total(protocol, operation, nbytes, n)
            assert sum(far) == every.control + every.data
            assert every.least <= every.control
            assert every.least + every.data >= lines.least(operation, nbytes, n) - 2 * (n - 1)
            assert sum(far) / n <= most <= sum(far)


def test_where_each_looks_at_each_every_rank_reads_every_other():
    for n in (2, 8, 32):
        every = lines.total(lines.FLAT, "all_reduce", 4096, n)
        assert (every.control, every.data) == (2 * n * (n - 1), 64 * n * (n - 1))


def test_large_reductions_move_what_they_must_whatever_the_number_of_ranks():
    for n in (3, 8, 16):
        every = lines.total(lines.FLAT, "all_reduce", 1 << 20, n)
        assert every.data == lines.least("all_reduce", 1 << 20, n)


def test_near_is_near():
    assert [HOST.distance(0, r) for r in (1, 7, 8, 31, 32)] == [0, 0, 1, 1, 2]
    far, _ = lines.by_distance(lines.FLAT, "barrier", 0, 8, HOST)
    assert far[1:] == [0, 0]
    # In a tree only first ranks look beyond their cache, but at the word that says that all have come.
    for reader, writer in lines.pairs(64):
        if HOST.distance(reader, writer) and reader % 8 and writer:
            assert lines.between(lines.CURRENT, "barrier", 0, 64, reader, writer) == lines.Lines(0, 0, 0)


def test_a_tree_costs_a_rank_a_few_lines_however_many_there_are():
    for n in (16, 64, 192, 1024):
        assert lines.total(lines.CURRENT, "barrier", 0, n).control < 4 * n


@pytest.mark.parametrize("nbytes", [4096, 8192, 16384])
def test_sums_from_4_kib_on_read_at_most_three_times_the_payload(nbytes):
    for n in (2, 3, 4, 8, 16, 64, 192):
        every = lines.total(lines.CURRENT, "all_reduce", nbytes, n)
        assert every.data / n <= 3 * nbytes / 64
