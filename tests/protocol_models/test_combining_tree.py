import pytest

from .checker import Found, check
from .combining_tree import TreeModel

ALIKE = (1, 1, 1, 1)


@pytest.mark.parametrize(
    "rounds, fan_in",
    [
        ([ALIKE[:2], (1, 2)], 2),
        ([ALIKE[:3], (1, 1, 2)], 2),
        ([(1, None, 1), ALIKE[:3]], 2),
        ([(1, 1, 2, 2)], 2),
        ([(1, 2, 1, 2)], 2),
        ([ALIKE[:3], (None,) * 3, ALIKE[:3]], 3),
    ],
)
def test_who_is_told_is_told_the_truth(rounds, fan_in):
    check(TreeModel(tuple(rounds), fan_in))


@pytest.mark.parametrize(
    "mutation, rounds", [("waits", [ALIKE[:3]] * 2), ("compares", [(1, 1, 2)]), ("forgets", [(1, None, 1), ALIKE[:3]])]
)
def test_each_rule_is_needed(mutation, rounds):
    with pytest.raises(Found):
        check(TreeModel(tuple(rounds), 2, **{mutation: False}))
