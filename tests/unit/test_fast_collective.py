"""Collectives from c10d's arguments to the core in one call: the extension tells the core what its
reference in Python tells it, and refuses the same."""

import ctypes
import sys

import pytest
import torch
from torch.distributed import ReduceOp

from c10d_custom import dtypes, native
from c10d_custom.call import Op
from c10d_custom.native.direct import collective as fast_collective
from unit.fast_reference import FastCollective as InPython

RANKS = 3
CORE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_int64,
)


def parts(n=RANKS, count=5, dtype=torch.float32):
    return [torch.zeros(count, dtype=dtype) for _ in range(n)]


T, U, ALL, TABLE, OTHERS = torch.zeros(5), torch.zeros(5), torch.zeros(RANKS, 5), parts(), parts()
HALF, EMPTY = torch.zeros(5, dtype=torch.float16), torch.zeros(0)
FLAGS = torch.zeros(5, dtype=torch.bool)
SUM, BAND = ReduceOp(ReduceOp.SUM), ReduceOp(ReduceOp.BAND)
FACTOR = torch.distributed._make_nccl_premul_sum(2.0)
# (operation, source, target, root, reduce op): taken on some rank, and refused on all.
TAKEN = [
    (Op.barrier, None, None, -1, None),
    (Op.broadcast, [T], [T], 0, None),
    (Op.broadcast, T, T, 2, None),
    (Op.all_reduce, [T], [T], -1, SUM),
    (Op.all_reduce, [HALF], [HALF], -1, ReduceOp(ReduceOp.MAX)),
    (Op.all_reduce, [FLAGS], [FLAGS], -1, BAND),
    (Op.reduce, [T], [T], 1, SUM),
    (Op.all_gather, [T], [TABLE], -1, None),
    (Op.all_gather, T, ALL, -1, None),
    (Op.all_gather, T, torch.zeros(RANKS * 5), -1, None),
    (Op.reduce_scatter, [TABLE], [T], -1, SUM),
    (Op.reduce_scatter, ALL, T, -1, SUM),
    (Op.all_to_all, TABLE, OTHERS, -1, None),
    (Op.all_to_all, ALL, torch.zeros(RANKS * 5), -1, None),
    (Op.gather, [T], [TABLE], 0, None),
    (Op.gather, [T], [], 1, None),
    (Op.scatter, [TABLE], [T], 0, None),
    (Op.scatter, [], [T], 1, None),
]
REFUSED = [
    (Op.broadcast, [T], [T], 3, None),
    (Op.broadcast, [T], [T], -1, None),
    (Op.broadcast, [T, U], [T, U], 0, None),
    (Op.broadcast, [EMPTY], [EMPTY], 0, None),
    (Op.broadcast, [None], [None], 0, None),
    (Op.broadcast, 5, 5, 0, None),
    (Op.all_reduce, [T], [T], -1, BAND),
    (Op.all_reduce, [T], [T], -1, FACTOR),
    (Op.all_reduce, [FLAGS], [FLAGS], -1, ReduceOp(ReduceOp.AVG)),
    (Op.all_reduce, [T], [HALF], -1, SUM),
    (Op.all_reduce, [T[::2]], [T[::2]], -1, SUM),
    (Op.all_reduce, [T], [T], 0, SUM),
    (Op.all_gather, [T], [parts(2)], -1, None),
    (Op.all_gather, [T], [parts(count=4)], -1, None),
    (Op.all_gather, [T], [[T, U, None]], -1, None),
    (Op.all_gather, [T], [parts(dtype=torch.int32)], -1, None),
    (Op.all_gather, [EMPTY], [parts(count=0)], -1, None),
    (Op.all_gather, T, torch.zeros(16), -1, None),
    (Op.all_gather, T, torch.zeros(RANKS * 4), -1, None),
    (Op.all_gather, torch.zeros(()), torch.zeros(()), -1, None),
    (Op.reduce_scatter, [[*parts(2), torch.zeros(4)]], [T], -1, SUM),
    (Op.all_to_all, TABLE, parts(count=6), -1, None),
    (Op.all_to_all, torch.zeros(4, 3), torch.zeros(4, 3), -1, None),
    (Op.gather, [T], [parts(2)], 0, None),
    (Op.scatter, [parts(4)], [T], 0, None),
]
ON_SOME_RANKS = [(Op.gather, [T], [TABLE], 1, None), (Op.scatter, [TABLE], [T], 1, None)]


@CORE
def answers(*_):
    return 7


def asked(make, case, rank):
    """(what `run` has returned, what the core was called with)."""
    calls = []

    @CORE
    def core(handle, kind, root, source, target, count, ns):
        def addresses(at, listed):
            return list((ctypes.c_void_p * RANKS).from_address(at)) if at and listed else at

        calls.append(
            (
                handle,
                kind,
                root,
                addresses(source, kind & native.LISTED_INPUTS),
                addresses(target, kind & native.LISTED_OUTPUTS),
                count,
                ns,
            )
        )
        return 7

    op, source, target, root, redop = case
    return make(core, 4711, rank, RANKS).run(op, source, target, root, redop, 10**10), calls


@pytest.mark.parametrize("rank", range(RANKS))
def test_c_asks_the_core_what_python_asks(rank):
    for case in TAKEN + REFUSED + ON_SOME_RANKS:
        in_c, in_python = asked(fast_collective, case, rank), asked(InPython, case, rank)
        assert in_c == in_python, case
        assert in_c[0] in (7, native.SLOW_PATH) and len(in_c[1]) == (in_c[0] == 7), case


@pytest.mark.parametrize("make", [fast_collective, InPython])
def test_what_is_taken(make):
    for case in TAKEN:
        assert any(asked(make, case, rank)[0] == 7 for rank in range(RANKS)), case
    for case in REFUSED:
        assert all(asked(make, case, rank)[0] == native.SLOW_PATH for rank in range(RANKS)), case
    for case in ON_SOME_RANKS:
        assert [asked(make, case, rank)[0] for rank in range(RANKS)] == [native.SLOW_PATH, 7, native.SLOW_PATH], case


SUBMIT = ctypes.CFUNCTYPE(ctypes.c_int, *CORE._argtypes_, ctypes.POINTER(ctypes.c_void_p))


@pytest.mark.parametrize("make", [fast_collective, InPython])
def test_submitting_asks_the_same_and_gives_a_ticket(make):
    for case in TAKEN + REFUSED:
        calls, tickets = [], []

        @SUBMIT
        def submit(*given):
            calls.append(given[:3])
            given[-1][0] = 4712
            return native.OK

        op, source, target, root, redop = case
        ran, asked_for = asked(make, case, 1)
        status = make(answers, 4711, 1, RANKS, submit).submit(op, source, target, root, redop, 10**10, tickets)
        assert (status, tickets) == ((native.OK, [4712]) if ran == 7 else (native.SLOW_PATH, [])), case
        assert calls == [call[:3] for call in asked_for], case
        assert make(answers, 4711, 1, RANKS).submit(op, source, target, root, redop, 1, []) == native.SLOW_PATH


@pytest.mark.parametrize("make", [fast_collective, InPython])
def test_what_the_core_is_told(make):
    float32 = dtypes.BY_DTYPE[torch.float32].code
    moved = float32 | 4 << 16
    (call,) = asked(make, (Op.gather, [T], [TABLE], 0, None), 0)[1]
    assert call == (
        4711,
        moved | Op.gather << 24 | native.LISTED_OUTPUTS,
        0,
        T.data_ptr(),
        [t.data_ptr() for t in TABLE],
        5,
        10**10,
    )
    (call,) = asked(make, (Op.gather, [T], [], 0, None), 2)[1]
    assert call == (4711, moved | Op.gather << 24, 0, T.data_ptr(), None, 5, 10**10)
    (call,) = asked(make, (Op.reduce_scatter, ALL, [T], -1, ReduceOp(ReduceOp.AVG)), 1)[1]
    assert call == (4711, moved | Op.reduce_scatter << 24 | 1 << 8, -1, ALL.data_ptr(), T.data_ptr(), 5, 10**10)


def test_a_reduce_op_is_its_number():
    for number, name in dtypes.REDUCE_OPS.items():
        if name != "PREMUL_SUM":
            assert hash(ReduceOp(dtypes.RedOp.__members__[name])) == hash(dtypes.RedOp.__members__[name]) == number


@pytest.mark.parametrize("make", [fast_collective, InPython])
def test_nothing_once_it_is_closed(make):
    path = make(answers, 4711, 0, RANKS)
    assert path.run(Op.barrier, None, None, -1, None, 1) == 7
    path.close()
    assert path.run(Op.barrier, None, None, -1, None, 1) == native.SLOW_PATH


def test_more_ranks_than_fit_the_stack():
    seen = []

    @CORE
    def core(handle, kind, root, source, target, count, ns):
        seen.append(list((ctypes.c_void_p * 200).from_address(target)))
        return 7

    many = parts(200, 1)
    assert fast_collective(core, 1, 0, 200).run(Op.all_gather, [torch.zeros(1)], [many], -1, None, 1) == 7
    assert seen == [[t.data_ptr() for t in many]]


def test_references_are_given_back():
    made = fast_collective(answers, 1, 0, RANKS)
    kept = (T, TABLE, *TABLE, None, type(made))
    before = [sys.getrefcount(o) for o in kept]
    for _ in range(1000):
        for case in ((Op.all_gather, [T], [TABLE], -1, None), (Op.all_gather, [T], [parts(2)], -1, None)):
            made.run(*case, 1)
        fast_collective(answers, 1, 0, RANKS)
    after = [sys.getrefcount(o) for o in kept]
    assert all(abs(a - b) < 100 for a, b in zip(after, before)), (before, after)
