"""The benchmarks of tests/gpu: what is made of times, and whether goals are met.

That they run at all: test_gpu_check.py."""

import pytest

from gpu.bench import goals
from gpu.bench.timing import Times, calls_for, figure, percentile

pytestmark = pytest.mark.lane2


def test_a_figure_is_the_slowest_rank_s_median():
    blocks = [
        [Times([1.0, 2.0, 9.0], 1.0), Times([3.0, 3.0, 3.0], 2.0)],
        [Times([2.0, 2.0, 2.0], 3.0), Times([1.0, 1.0, 3.0], 4.0)],
    ]
    found = figure(blocks)
    assert (found.single, found.row, found.worst, found.calls) == (3.0, 3.0, 9.0, 6)


@pytest.mark.parametrize(
    "values, share, wanted",
    [([1], 0.9, 1), (range(1, 11), 0.9, 9), (range(1, 11), 0.91, 10), ([5, 1, 3], 0.5, 3), ([2, 1], 0.0, 1)],
)
def test_percentile(values, share, wanted):
    assert percentile(list(values), share) == wanted


def test_calls_for_a_block():
    assert [calls_for(s, 0.12) for s in (1e-6, 0.001, 0.02, 5.0)] == [200, 60, 3, 2]


def result(**fields):
    return {
        "operation": "all_reduce",
        "ranks": 4,
        "bytes": 256 << 20,
        "backend": "custom",
        "floor_us": 1000.0,
        **fields,
    }


def test_goals_are_judged():
    met = [result(row_us=2999.0, single_us=3000.0), result(backend="gloo", row_us=0.0, single_us=30000.0)]
    missed = [result(row_us=3001.0, single_us=3001.0), result(backend="gloo", row_us=0.0, single_us=30000.0)]
    assert [m for _, m in goals.floor_goal(met) + goals.gloo_goal(met)] == [True, True]
    assert [m for _, m in goals.floor_goal(missed) + goals.gloo_goal(missed)] == [False, False]
    steps = [
        {"operation": "ddp", "ranks": 2, "parameters": p, "backend": b, "single_us": us}
        for p, b, us in ((1, "custom", 5), (1, "gloo", 5), (2, "custom", 6), (2, "gloo", 5))
    ]
    assert [m for _, m in goals.ddp_goal(steps)] == [True, False]
    assert not goals.gloo_goal([result(bytes=1024, single_us=1.0), result(bytes=1024, backend="gloo", single_us=2.0)])
