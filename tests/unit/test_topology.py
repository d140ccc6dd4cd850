"""What the ranks of a group tell each other through the store before they have anything else."""

import json
import re
import threading
import time

import pytest
from torch.distributed import HashStore

from c10d_custom.creation import Processes, topology
from c10d_custom.creation.exchange import Exchange
from c10d_custom.creation.topology import Location, locations
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


class Watching(Processes):
    """Notes whom it is told of."""

    def __init__(self):
        super().__init__()
        self.told = set()

    def add(self, rank, pid, start):
        self.told.add(rank)


@pytest.mark.parametrize("mailboxes", [["a", "b", "c", "d"], ["a", "b", "", "d"]])
def test_ranks_of_a_host_that_can_write_to_each_other_leave_the_rest_to_rank_0(mailboxes):
    """To watch the others, and to say when all have heard of it, which the store then need not hear."""
    store, size = HashStore(), len(mailboxes)
    exchanges = [Exchange(store, rank, size, 20.0, Watching()) for rank in range(size)]
    made = [None] * size

    def run(rank):
        made[rank] = locations(exchanges[rank], mailboxes[rank])

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    by_letters = all(mailboxes)
    told = mailboxes if by_letters else [""] * size
    assert [[place.mailbox for place in places] for places, _ in made] == [told] * size
    assert [how for _, how in made] == [by_letters] * size
    for exchange in exchanges[1:]:
        assert exchange.processes.told - {0, exchange.rank} == (set() if by_letters else {1, 2, 3} - {exchange.rank})
    assert exchanges[0].processes.told >= {1, 2, 3}
    assert not store.check(["place/heard"])
    assert store.num_keys() == (3 if by_letters else 0)
    exchanges[0].all_heard()
    assert store.num_keys() == 0


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_of_two_revisions_of_this_package_are_told_so(odd, monkeypatch):
    """All of them, by one sentence, also by a rank of a revision that did not say which it is."""
    said = {odd: "0.1.0, revision b"}
    monkeypatch.setattr(
        topology, "described", lambda: said.get(int(threading.current_thread().name), "0.1.0, revision a")
    )
    store, errors = HashStore(), {}

    def run(rank):
        try:
            locations(Exchange(store, rank, 3, 20.0))
        except TransportError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(errors) == {0, 1, 2}
    for text in errors.values():
        assert re.search(
            r"rank \d \(\S+\): 0.1.0, revision [ab]; rank \d \(\S+\): 0.1.0, revision [ab]. Install", text
        ), text
        assert f"rank {odd} (" in text and "revision a" in text and "revision b" in text, text


def test_a_revision_that_does_not_say_which_it_is(monkeypatch):
    exchange = Exchange(HashStore(), 0, 2, 20.0)
    exchange.store.append("place/said", f"[1, {json.dumps(Location.here().described())}]\n")
    with pytest.raises(
        TransportError, match="rank 0 .*0.1.0, revision .*; rank 1 .*: an older one, which does not say"
    ):
        locations(exchange)
