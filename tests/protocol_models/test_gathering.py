import pytest

from .checker import Found, check
from .gathering import GatheringModel

WRITERS = [(1,), (2,), (0, 1), (1, 1), (2, 1), (1, 1, 0)]


@pytest.mark.parametrize("pieces", WRITERS, ids=str)
def test_every_sleep_ends(pieces):
    assert check(GatheringModel(pieces)) > 15


@pytest.mark.parametrize("mutation", [{"rings_if_last": False}, {"write_first": False}], ids=str)
def test_a_broken_protocol_loses_a_wake_up(mutation):
    with pytest.raises(Found, match="nobody can go on"):
        for pieces in WRITERS:
            check(GatheringModel(pieces, **mutation))
