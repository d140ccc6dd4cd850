import pytest

from .checker import Found, check
from .put_signal import PutSignal


def test_who_has_waited_reads_what_was_put():
    assert check(PutSignal(3)) > 20


@pytest.mark.parametrize("rule", ["release", "acquire", "reads_first"])
def test_each_rule_is_needed(rule):
    """As where the store, or the load, of a signal were relaxed."""
    with pytest.raises(Found, match="has read"):
        check(PutSignal(3, **{rule: False}))
