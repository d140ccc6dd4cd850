"""The same call on this backend and on gloo, in the same processes: equal bits where gloo can do it."""

import dataclasses
import functools
import itertools

import pytest
import torch.distributed as dist

from . import gloo, reference, values
from .cases import Case, Group, check
from .test_all_gather import all_gather, all_gather_into_tensor
from .test_all_reduce import all_reduce
from .test_all_to_all_single import all_to_all_single, all_to_all_single_uneven
from .test_broadcast import broadcast
from .test_gather import gather
from .test_reduce import reduce
from .test_reduce_scatter import reduce_scatter_tensor
from .test_scatter import scatter


@functools.cache
def _groups():
    ranks = tuple(range(dist.get_world_size()))
    return Group(dist.group.WORLD, ranks), Group(dist.new_group(list(ranks), backend="gloo"), ranks)


def _results(perform, case, group):
    """What perform yields, as copies: (what, bits)."""
    return [(what, values.raw(getattr(got, "tensor", got)).clone()) for what, got, _ in perform(case, group)]


def _agree(perform, cases):
    ours, theirs = _groups()
    wrong = []
    for case in cases:
        for (what, mine), (_, other) in zip(
            _results(perform, case, ours), _results(perform, case, theirs), strict=True
        ):
            if perform is reduce and what.endswith("away from the root"):
                continue  # gloo leaves anything there
            problem = reference.difference(mine, other)
            if problem:
                wrong.append(f"{case}: {what}: {problem}")
    return wrong


def _cases(collective, reducing, world_size):
    pairs = values.PAIRS if reducing else [(dtype, None) for dtype in values.DTYPES]
    counts = itertools.cycle((7, 40001, 1))
    cases = [
        Case(dtype, next(counts), op, "mild" if op else "bits", root=root) for root, (dtype, op) in enumerate(pairs)
    ]
    cases += [
        dataclasses.replace(case, kind="rough", count=next(counts))
        for case in cases
        if case.op and case.dtype in values.INTEGERS
    ]
    return [
        case
        for case in cases
        if not gloo.lacks(collective, case, world_size) and not (case.dtype in values.COMPLEX and case.op == "PRODUCT")
    ]


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize(
    "perform",
    [
        all_reduce,
        reduce,
        reduce_scatter_tensor,
        broadcast,
        all_gather,
        all_gather_into_tensor,
        gather,
        scatter,
        all_to_all_single,
        all_to_all_single_uneven,
    ],
)
def test_agrees(ranks, beyond_gloo, perform):
    beyond_gloo("agrees with itself")
    cases = _cases(perform.__name__, perform in (all_reduce, reduce, reduce_scatter_tensor), ranks.world_size)
    check(ranks, _agree, perform, cases, timeout=120)
