import pytest

from .checker import Found, check
from .window import Window

# As the operations call pipeline(): which ranks fill and drain, and whether there is a reduce stage.
SHAPES = {
    "all_reduce of 2, all_gather, all_to_all": {"reduces": False},
    "broadcast": {"reduces": False, "fills": (0,), "drains": (1,)},
    "reduce of 2, gather": {"reduces": False, "drains": (0,)},
    "scatter": {"reduces": False, "fills": (0,)},
    "all_reduce of more": {"reduces": True},
    "reduce of more": {"reduces": True, "drains": (0,)},
}
SIZES = [(2, 2, 6), (2, 3, 7), (3, 2, 3), (2, 4, 9)]  # ranks, slots of the window, blocks
CASES = [(*sizes, name) for sizes in SIZES for name in SHAPES]
LARGE = pytest.mark.full("a larger window of the same two ranks, or many times the states")


def shape(name, ranks):
    given = dict(SHAPES[name])
    if name == "broadcast":
        given["drains"] = tuple(range(1, ranks))
    return given


def is_large(n, window, blocks, name):
    return window == 4 or (n, name) == (3, "all_reduce of more")


@pytest.mark.parametrize(
    "n, window, blocks, name", [pytest.param(*case, marks=LARGE if is_large(*case) else ()) for case in CASES]
)
def test_no_slot_is_reused_early_and_nobody_waits_forever(n, window, blocks, name):
    assert check(Window(n, window, blocks, **shape(name, n))) > 20


@pytest.mark.parametrize(
    "mutation, name, sizes, found",
    [
        ({"slack": 1}, "all_reduce of 2, all_gather, all_to_all", (2, 2, 4), "reuses the slot"),
        ({"slack": 1}, "all_reduce of more", (3, 2, 3), "reuses the slot"),
        ({"own": False}, "reduce of more", (2, 2, 4), "reuses the slot"),
        ({"early_out": True}, "all_reduce of more", (2, 2, 4), "reuses the slot"),
        ({"greedy": True}, "all_reduce of 2, all_gather, all_to_all", (2, 2, 6), "nobody can go on"),
        ({"notices": False}, "broadcast", (2, 2, 6), "nobody can go on"),
    ],
    ids=str,
)
def test_a_broken_protocol_is_found(mutation, name, sizes, found):
    with pytest.raises(Found, match=found):
        check(Window(*sizes, **shape(name, sizes[0]), **mutation))
