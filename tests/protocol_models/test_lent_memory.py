import pytest

from .checker import Found, check
from .lent_memory import LentMemory


@pytest.mark.parametrize("calls, allocations, most", [(1, 2, 1), (2, 3, 1), (3, 3, 2), (3, 4, 2)])
def test_a_kernel_finds_what_it_was_told_of_as_long_as_it_runs(calls, allocations, most):
    assert check(LentMemory(calls, allocations, most)) > 100


@pytest.mark.parametrize(
    "mutation, found",
    [
        ({"by_place": True, "tells_freed": False}, "other memory than was told"),
        ({"closes_stale": False, "tells_freed": False}, "other memory than was told"),
        ({"waits": False}, "not there any more"),
        ({"keeps_failed": False}, "not there any more"),
        ({"idle_first": False}, "has closed what its kernel works on"),
        ({"tells_freed": False}, "stays open that its owner has freed"),
        ({"closes_at_end": False}, "something stays open"),
    ],
    ids=str,
)
def test_a_broken_protocol_is_found(mutation, found):
    with pytest.raises(Found, match=found):
        check(LentMemory(3, 4, 2, **mutation))
