"""What ranks say of the parts of an uneven collective, over hosts in a number each, and what an error tells of them;
and a message that is shorter than was agreed on."""

import random
from types import SimpleNamespace

import pytest

from c10d_custom import dtypes
from c10d_custom.call import ANY_COUNT, SHAPES, Call, Op, Region
from c10d_custom.errors import TransportError
from c10d_custom.transport.call_log import Fingerprint
from c10d_custom.transport.disagreement import mismatch_table, moves
from c10d_custom.transport.hosts.balance import Balances, fit, of_part, together
from c10d_custom.transport.hosts.link import MpiLink
from c10d_custom.transport.hosts.transport import all_well

FLOAT = dtypes.BY_CODE[next(code for code, dtype in dtypes.BY_CODE.items() if dtype.name == "float32")]
UNEVEN = [op for op, shape in SHAPES.items() if shape.from_each or shape.to_each]


def calls_of(op, sizes, root):
    """Of each rank. ``sizes``: [giver][taker], of all_gather and reduce_scatter alike for each taker or giver."""
    n, shape, calls = len(sizes), SHAPES[op], []
    for rank in range(n):
        gives = [Region(0, 4 * size, size) for size in sizes[rank]]
        gets = [Region(0, 4 * sizes[r][rank], sizes[r][rank]) for r in range(n)]
        ins = gives if shape.from_each else gives[root if op is Op.gather else rank :][:1]
        outs = gets if shape.to_each else gets[root if op is Op.scatter else rank :][:1]
        call = Call(op, op.name, FLOAT, 1.0, ins, outs, root if shape.rooted else -1, ANY_COUNT)
        if shape.rooted and rank != root:
            if op is Op.gather:
                call.outputs = []
            else:
                call.inputs = []
        calls.append(call)
    return calls


def random_sizes(rng, op, n):
    row = [rng.randint(0, 9) for _ in range(n)]
    if op is Op.all_gather:
        return [[row[a]] * n for a in range(n)]
    if op is Op.reduce_scatter:
        return [row[:] for _ in range(n)]
    return [[rng.randint(0, 9) for _ in range(n)] for _ in range(n)]


@pytest.mark.parametrize("op", UNEVEN, ids=lambda op: op.name)
def test_balances_are_nothing_together_where_all_parts_fit_and_only_there(op):
    rng = random.Random(op)
    for _ in range(100):
        n, rooted = rng.randint(2, 9), SHAPES[op].rooted
        root = rng.randrange(n) if rooted else -1
        calls = calls_of(op, random_sizes(rng, op, n), root)
        of_ranks = [Balances(r, n) for r in range(n)]
        said = [of_rank.of(call) for of_rank, call in zip(of_ranks, calls)]
        cut = rng.randint(0, n)
        assert fit(said) and fit([together(said[:cut]), together(said[cut:])])
        if rooted:  # as the others know them, who know only how large the part of each rank is
            for r in set(range(n)) - {root}:
                part = (calls[r].inputs or calls[r].outputs)[0].nbytes
                assert of_part(op, root, r, part) == said[r]
        for rank in rng.sample(range(n), rng.randint(1, n)):
            wrong = calls[rank]
            side = wrong.inputs if wrong.inputs and (rng.random() < 0.5 or not wrong.outputs) else wrong.outputs
            at = rng.randrange(len(side))
            side[at] = Region(0, side[at].nbytes + rng.choice([4, 8, 1 << 20]), 0)
            said[rank] = of_ranks[rank].of(wrong)
        sizes = [[[t.nbytes for t in side] for side in (call.inputs, call.outputs)] for call in calls]

        def part(row, other):
            return row[0] if len(row) == 1 else row[other]

        unfit = any(
            moves(op, root, a, b) and part(sizes[a][0], b) != part(sizes[b][1], a) for a in range(n) for b in range(n)
        )
        assert fit(said) != unfit


def table(op, counts, sizes, root=-1):
    prints = {r: Fingerprint(1, op, 0, FLOAT.code, root, count, 0) for r, count in enumerate(counts)}
    known = {r: [[4 * n for n in row] for row in rows] for r, rows in sizes.items()}
    return mismatch_table(prints, range(len(counts)), known)


def test_the_table_of_parts_that_do_not_fit():
    n = 40
    sizes = {r: ([5] * n, [5] * n) for r in range(n)}
    sizes[30] = ([5] * 35 + [4] * 5, [5] * n)
    text = table(Op.all_to_all, [ANY_COUNT] * n, sizes)
    # What is wrong is named, also of ranks of which the table has no room to tell.
    assert text.startswith(
        "they differ in the sizes of their parts (rank 30 gives rank 35 4, which expects 5; rank 30 gives rank 36 4, "
        "which expects 5; rank 30 gives rank 37 4, which expects 5; and 2 more):\n"
    )
    assert f"  rank 0: all_to_all #1 float32[uneven]: gives {'5, ' * 16}..., gets {'5, ' * 16}..." in text


def test_the_table_of_a_gather_of_which_the_root_alone_has_all_parts():
    text = table(Op.gather, [3, ANY_COUNT, 6], {1: ([4] * 3, [3, 4, 5])}, root=1)
    assert text == (
        "they differ in the sizes of their parts (rank 2 gives rank 1 6, which expects 5):\n"
        "  rank 0: gather #1 float32[3] root 1\n"
        "  rank 1: gather #1 float32[uneven] root 1: gets 3, 4, 5\n"
        "  rank 2: gather #1 float32[6] root 1"
    )
    assert table(Op.gather, [3, 4, 3], {}, root=1).startswith("they differ in count:\n")


def test_the_table_where_some_say_uneven_and_others_not():
    text = table(Op.all_gather, [4, ANY_COUNT], {1: ([5] * 2, [4, 5])})
    assert text == (
        "they differ in count:\n  rank 0: all_gather #1 float32[4]\n"
        "  rank 1: all_gather #1 float32[uneven]: gives 5, gets 4, 5"
    )


class FakeMpi:
    """Of which requests are complete at once, and receives have so many bytes."""

    REQUEST_NULL, Exception = None, OSError

    class Status:
        came, source = -1, -1

        def Get_count(self, datatype):
            return self.came

        def Get_source(self):
            return self.source

    class Request:
        @staticmethod
        def Testall(requests, statuses=()):
            for request, status in zip(requests, statuses):
                status.came, status.source = request.came, 3
            return True


@pytest.mark.parametrize("came, right", [([12, 8], True), ([12, 7], False), ([0, 8], False)])
def test_a_message_that_is_shorter_than_was_agreed_on_is_an_error(came, right, monkeypatch):
    link, given_up = object.__new__(MpiLink), []
    link.MPI, link._byte = FakeMpi, None
    monkeypatch.setattr(link, "give_up", lambda requests, keep: given_up.append(keep))
    requests = [SimpleNamespace(came=n) for n in came]
    wait = lambda lengths: link.wait(requests, 1e9, [3], "kept", lengths)
    wait([])
    if right:
        return wait([12, 8])
    with pytest.raises(TransportError, match=r"has brought \d+ bytes of rank 3, instead of the (12|8) that"):
        wait([12, 8])
    assert given_up == ["kept"]


def test_the_lengths_of_pieces(monkeypatch):
    monkeypatch.setattr("c10d_custom.transport.hosts.link.PIECE", 10)
    assert [MpiLink.lengths(n) for n in (0, 1, 10, 11, 30)] == [[], [1], [10], [10, 1], [10, 10, 10]]


def test_pieces_of_different_lengths_are_refused_when_a_group_is_made():
    said = [{"rank": r, "error": None, "offer": None, "chunk": 1 << 16} for r in range(3)]
    assert all_well(said)["ranks"] == [0, 1, 2]
    said[1]["chunk"] = 1 << 18
    with pytest.raises(TransportError, match="CHUNK_BYTES differs .*rank 1: 262144, rank 2: 65536"):
        all_well(said)
