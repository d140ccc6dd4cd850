from itertools import combinations_with_replacement

import pytest

from .checker import Found, check
from .wakeup import Wakeup

# What pipeline.h asks for: the next block, woken for up to a batch; and the waits of the calls after it.
TWO_RANKS = [((1, 1), (2, 2), (3, 3)), ((1, 2), (2, 3), (3, 3)), ((1, 3), (3, 3)), ((1, 1), (3, 3))]
THREE_RANKS = list(combinations_with_replacement(TWO_RANKS, 2))


@pytest.mark.parametrize("waits", [*((w,) for w in TWO_RANKS), *THREE_RANKS], ids=str)
def test_every_wait_ends(waits):
    assert check(Wakeup(3, waits)) > 40


@pytest.mark.parametrize(
    "mutation",
    [
        {"recheck": False},
        {"wakes": False},
        {"store_first": False},
        {"counts": False},
        {"sleep_on": "value"},
        {"sleep_on": "wake_at"},
    ],
    ids=str,
)
def test_a_broken_protocol_loses_a_wake_up(mutation):
    with pytest.raises(Found, match="nobody can go on"):
        for waits in [*((w,) for w in TWO_RANKS), *THREE_RANKS]:
            check(Wakeup(3, waits, **mutation))
