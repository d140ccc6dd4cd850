"""Staged collectives: what has not come out of the GPU is not reduced."""

from types import SimpleNamespace

import pytest
import torch

from c10d_custom import dtypes
from c10d_custom.call import Call, Op
from c10d_custom.config import Config
from c10d_custom.errors import AbortedError
from c10d_custom.transport.cuda.staged import StagedCollectives


@pytest.mark.parametrize(
    "why", [AbortedError("the group is over"), None], ids=["all is over", "a later call has failed"]
)
def test_a_piece_that_has_not_come_is_not_reduced(why):
    """A group that is known to fail stops the wait for the GPU; the other ranks' calls before the failure go on."""
    agreed, ran = [], []

    def agree(call, seconds):
        agreed.append(call)
        if why is not None:
            raise why

    came = [False, True]  # from the end: there is room; the copy of the piece does not come
    events, late = iter(range(9)), AbortedError("late")
    driver = SimpleNamespace(
        take_event=lambda: next(events), record=lambda *_: None, copy=lambda *_: None, allocate_pinned=lambda n: 1 << 20
    )
    place = SimpleNamespace(
        cpu=SimpleNamespace(size=2, agree=agree, run=ran.append),
        driver=driver,
        stream=0,
        config=Config(),
        came=lambda call, event, seconds, what: came.pop(),
        late=lambda call, what: late,
    )
    x = torch.ones(100)
    call = Call(Op.all_reduce, "all_reduce", dtypes.lookup(x.dtype), 5.0, [x], [x], count=100)
    with pytest.raises(AbortedError) as raised:
        StagedCollectives(place).run(call, lambda: 5.0)
    assert raised.value is (why or late) and agreed == [call] and not ran
