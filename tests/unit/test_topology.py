"""What the ranks of a group tell each other through the store before they have anything else."""

import threading
import time

import pytest
from torch.distributed import HashStore

from c10d_custom.creation.exchange import Exchange
from c10d_custom.errors import TransportError


class SlowToRead:
    """A store whose answers take a while."""

    def __init__(self, store, seconds):
        self.store, self.seconds = store, seconds

    def set(self, key, value):
        self.store.set(key, value)

    def append(self, key, value):
        self.store.append(key, value)

    def compare_set(self, key, *values):
        time.sleep(self.seconds)
        return self.store.compare_set(key, *values)


def refuse(values):
    raise TransportError("refused")


@pytest.mark.parametrize("decide", [sum, refuse])
def test_rank_0_returns_only_when_all_have_heard(decide):
    """It may exit then, and the store with it."""
    store = HashStore()
    heard = []

    def rank_1():
        try:
            heard.append(Exchange(SlowToRead(store, 0.3), 1, 2, 10).gather_and_decide("t", 1, None))
        except TransportError as error:
            heard.append(str(error))

    thread = threading.Thread(target=rank_1)
    thread.start()
    if decide is refuse:
        with pytest.raises(TransportError):
            Exchange(store, 0, 2, 10).gather_and_decide("t", 2, decide)
    else:
        assert Exchange(store, 0, 2, 10).gather_and_decide("t", 2, decide) == 3
    assert not store.num_keys()  # rank 0 deletes what all have heard
    thread.join()
    assert heard == ["refused" if decide is refuse else 3]
