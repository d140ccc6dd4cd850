import pytest

from .checker import Found, check
from .doorbell import DoorbellModel

WAKERS = [(1,), (3,), (1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("pieces", WAKERS, ids=str)
def test_every_sleep_ends(pieces):
    assert check(DoorbellModel(pieces)) > 15


@pytest.mark.parametrize(
    "mutation", [{"rings_first": False}, {"recheck": False}, {"counts": False}, {"publish_first": False}], ids=str
)
def test_a_broken_protocol_loses_a_wake_up(mutation):
    with pytest.raises(Found, match="nobody can go on"):
        for pieces in WAKERS:
            check(DoorbellModel(pieces, **mutation))
