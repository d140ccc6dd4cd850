"""The same bits on every run, in one piece or in many, whichever collective computes them."""

import pytest
import torch
import torch.distributed as dist

from . import reference
from .cases import Case, check, finish
from .cases import group as make_group

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def _repeated(times):
    g = make_group()
    wrong = []
    for dtype in DTYPES:
        for count in (11, 9000, 200003):
            first = None
            for turn in range(times):
                data = g.input(Case(dtype, count, "SUM", "rough"))
                finish(dist.all_reduce(data, async_op=turn % 2 == 1), Case(dtype, count, async_op=turn % 2 == 1))
                first = data if first is None else first
                problem = reference.difference(data, first)
                if problem:
                    wrong.append(f"{dtype}[{count}], run {turn}: {problem}")
    return wrong


def test_repeated(ranks):
    check(ranks, _repeated, 6)


def _in_pieces(op):
    g = make_group()
    wrong = []
    for dtype in DTYPES:
        case = Case(dtype, 700001, op, "rough")
        whole, pieces = g.input(case), g.input(case)
        dist.all_reduce(whole, case.reduce_op())
        sizes = [1, 7, 2048, 4095, 16385, 65536, 100000]
        sizes.append(case.count - sum(sizes))
        for piece in pieces.split(sizes):
            dist.all_reduce(piece, case.reduce_op())
        problem = reference.difference(pieces, whole)
        if problem:
            wrong.append(f"{dtype}: {problem}")
    return wrong


@pytest.mark.parametrize("op", ["SUM", "AVG", "PREMUL_SUM"])
def test_in_pieces(ranks, backend, op):
    if backend == "gloo" and (ranks.world_size > 2 or op == "PREMUL_SUM"):
        pytest.skip("gloo: the order of adding depends on the place, and it has no PREMUL_SUM")
    check(ranks, _in_pieces, op)


def _by_other_ways():
    """all_reduce, reduce, reduce_scatter + all_gather: one result."""
    g = make_group()
    wrong = []
    for dtype in DTYPES:
        for share in (3, 50001):
            case = Case(dtype, g.size * share, "SUM", "rough")
            results = {"all_reduce": g.input(case)}
            dist.all_reduce(results["all_reduce"])
            part, results["reduce_scatter + all_gather"] = g.input(case)[:share].clone(), g.input(case)
            dist.reduce_scatter_tensor(part, g.input(case))
            dist.all_gather_into_tensor(results["reduce_scatter + all_gather"], part)
            reduced = g.input(case)
            dist.reduce(reduced, g.size - 1)
            if g.me == g.size - 1:
                results["reduce"] = reduced
            for way, result in results.items():
                problem = reference.difference(result, results["all_reduce"])
                if problem:
                    wrong.append(f"{dtype}[{case.count}] by {way}: {problem}")
    return wrong


def test_by_other_ways(ranks, backend):
    if backend == "gloo" and ranks.world_size > 2:
        pytest.skip("gloo: each collective adds in an order of its own")
    check(ranks, _by_other_ways)


def _own_factors(count):
    """PREMUL_SUM takes each rank's own factor."""
    g = make_group()
    wrong = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        case = Case(dtype, count, "PREMUL_SUM", "rough")
        factors = [0.1 + 0.7 * rank for rank in g.ranks]
        data = g.input(case)
        dist.all_reduce(data, dist._make_nccl_premul_sum(factors[g.me]))
        want = reference.reduce_by_host([g.input(case, i) for i in range(g.size)], "PREMUL_SUM", g.ranks, factors)
        problem = reference.difference(data, want)
        if problem:
            wrong.append(f"{dtype}[{count}]: {problem}")
    return wrong


def test_premul_sum_with_own_factors(ranks, beyond_gloo):
    beyond_gloo("has no PREMUL_SUM")
    for count in (7, 200003):
        check(ranks, _own_factors, count)


def _signed_zero():
    """Minus zero from every rank stays minus zero: nothing is added to the first rank's value but the others'."""
    wrong = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        data = torch.full((5000,), -0.0, dtype=dtype)
        dist.all_reduce(data)
        wrong += filter(None, [reference.difference(data, torch.full((5000,), -0.0, dtype=dtype))])
    return wrong


def test_signed_zero(ranks):
    check(ranks, _signed_zero)
