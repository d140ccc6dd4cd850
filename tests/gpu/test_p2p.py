"""The fused kernels, in which ranks wait for each other: each rank needs a GPU of its own, or all must be clients of
MPS.

C10D_CUSTOM_CUDA_MODE=p2p asks for them; without it the tests elsewhere run whatever mode the package chooses.
"""

import os

import pytest

from conformance.test_all_reduce import all_reduce
from harness import RankFailure

from .test_streams import after_what_is_queued, captured, many_groups, replayed

pytestmark = pytest.mark.skipif(
    os.environ.get("C10D_CUSTOM_CUDA_MODE") != "p2p", reason="C10D_CUSTOM_CUDA_MODE=p2p is not set"
)


def needs_a_gpu_each(attempt):
    """Skips where the package refuses the mode because ranks share a GPU."""
    try:
        attempt()
    except RankFailure as failure:
        if "needs a GPU for each rank" in str(failure):
            pytest.skip("the package's p2p mode wants a GPU for each rank")
        raise


@pytest.mark.parametrize("section", ["small", "sizes", "mixed"])
def test_all_reduce(conform, section):
    needs_a_gpu_each(lambda: conform(all_reduce, (section,), reducing=True))


@pytest.mark.parametrize("case", [after_what_is_queued, many_groups], ids=["one group", "several groups"])
def test_streams(ranks, device, case):
    def attempt():
        arguments = (100_003, True) if case is after_what_is_queued else (100_003,)
        assert not any(found := ranks.run(case, device, *arguments)), found

    needs_a_gpu_each(attempt)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("count", [3, 1_000_003])
def test_replays(ranks, device, needs_queues, count, asynchronous):
    if ranks.world_size == 1:
        pytest.skip("a single rank needs no fused kernels")

    def attempt():
        assert not any(found := ranks.run(replayed, device, count, asynchronous)), found

    needs_a_gpu_each(attempt)


def test_graph_capture_works(ranks, device, needs_queues):
    if ranks.world_size == 1:
        pytest.skip("a single rank needs no fused kernels")

    def attempt():
        assert not any(found := ranks.run(captured, device)), found

    needs_a_gpu_each(attempt)
