"""How many operations on the store it takes a rank to meet the others, and what is left there."""

import subprocess
import threading
import time
from collections import Counter

import pytest
from torch.distributed import HashStore, PrefixStore

from c10d_custom.creation import Processes, started
from c10d_custom.creation import exchange as module
from c10d_custom.creation.exchange import Exchange, life
from c10d_custom.errors import AbortedError, PeerLostError, TransportError

TOPICS = 3
LOOK = "compare_set"  # of which a rank that waits makes more, the longer it waits


class Counting:
    """A store that counts what it is asked for."""

    def __init__(self, store):
        self.store, self.counts = store, Counter()

    def __getattr__(self, name):
        self.counts[name] += 1
        return getattr(self.store, name)


def operations(size):
    """Of ``size`` ranks that meet ``TOPICS`` times: the most of each kind that any of them made, looks left out."""
    store, made = HashStore(), [None] * size

    def rank_main(rank):
        counting = Counting(store)
        exchange = Exchange(counting, rank, size, 60.0)
        for topic in range(TOPICS):
            exchange.say(f"of {rank}/{topic}", rank)
            assert exchange.gather_and_decide(f"{topic}", rank, sum) == size * (size - 1) // 2
        made[rank] = counting.counts

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(made)
    assert store.num_keys() == 0
    kinds = {kind for counts in made for kind in counts} - {LOOK}
    return {kind: max(counts[kind] for counts in made) for kind in kinds}


def test_a_ranks_operations_do_not_grow_with_the_group():
    few = operations(4)
    assert few == operations(64)
    assert sum(few.values()) <= 8 * TOPICS  # a word of its own, one for the topic, a verdict, what is deleted


def test_a_name_that_ranks_gave_up_comes_again():
    """What the failed group has left in the store is not taken for the next one's; who comes late hears what became of
    it."""
    store = HashStore()
    assert life(store, 0) == 0
    on_time = Exchange(PrefixStore("0", store), 0, 2, 0.2)
    with pytest.raises(TransportError, match="heard nothing from rank 1") as raised:
        on_time.gather_and_decide("t", 0, sum)
    on_time.give_up(raised.value)
    assert (life(store, 0), life(store, 1)) == (1, 0)
    late = Exchange(PrefixStore("0", store), 1, 2, 20.0)
    with pytest.raises(TransportError, match="heard nothing from rank 1") as raised:
        late.gather_and_decide("t", 1, sum)
    late.give_up(raised.value)
    assert (life(store, 0), life(store, 1)) == (1, 1)


def test_after_a_rank_that_was_not_seen_to_hear_all_go_one_number_on(monkeypatch):
    """It may still be looking at these keys when the group has been destroyed, and is made again."""
    monkeypatch.setattr(module, "_HEARD_SECONDS", 0.1)
    store = HashStore()
    store.append("0/t/said", "[1, 1]\n")  # and no more of rank 1
    first = Exchange(PrefixStore("0", store), 0, 2, 20.0)
    assert first.gather_and_decide("t", 0, sum) == 1
    first.complete()
    assert (life(store, 0), life(store, 1)) == (1, 1)


def test_rank_0_waits_for_no_word_of_ranks_that_do_not_come_any_more(monkeypatch):
    """As shrink_group knows of those of other hosts, whose processes cannot be seen."""
    monkeypatch.setattr(module, "_HEARD_SECONDS", 60.0)
    store, began = HashStore(), time.monotonic()
    store.append("t/said", "[1, 1]\n")  # and no more of rank 1
    lost = Processes(left_for=lambda: "rank 1 was lost" if store.check(["t/verdict"]) else None)
    first = Exchange(store, 0, 2, 60.0, lost)
    assert first.gather_and_decide("t", 0, sum) == 1
    assert time.monotonic() - began < 30
    with pytest.raises(AbortedError, match="rank 1 was lost, and does not come"):
        first.require_all_coming()


def test_the_dead_are_told_from_those_that_are_not_there_yet():
    ended = subprocess.Popen(["sleep", "60"])
    members = Processes()
    members.add(1, ended.pid, started(ended.pid))
    ended.kill()
    ended.wait()
    store = HashStore()
    exchange = Exchange(store, 0, 3, 20.0, members)
    with pytest.raises(PeerLostError, match=rf"rank 1 \(pid {ended.pid}\) has died\. Not there yet: rank 2\.$"):
        exchange.gather_and_decide("t", 0, sum)


def test_who_has_given_up_is_not_said_to_be_missing():
    store = HashStore()
    other = Exchange(store, 1, 2, 20.0)
    other.give_up(TransportError("no memory"))
    with pytest.raises(TransportError, match=r"rank 1 gave up: no memory$"):
        Exchange(store, 0, 2, 20.0).gather_and_decide("t", 0, sum)


def test_who_waits_for_rank_0_does_not_read_what_all_others_have_said():
    """In a large group that is long, and many wait."""
    store, looked_at, met, there = HashStore(), [], [], threading.Event()

    class Noting(Counting):
        def compare_set(self, key, *values):
            looked_at.append(key)
            return self.store.compare_set(key, *values)

    def rank_main(rank, of, meet):
        Exchange(of, rank, 3, 60.0).gather_and_decide("t", f"of {rank}", lambda values: None, meet)

    def meet(rank, value):
        met.append((rank, value))
        there.set()

    given = [(0, store, lambda *_: None), (1, Noting(store), meet), (2, store, lambda *_: None)]
    threads = [threading.Thread(target=rank_main, args=one, daemon=True) for one in given]
    for thread in threads[:2]:
        thread.start()
    assert there.wait(60)
    time.sleep(0.5)
    threads[2].start()
    for thread in threads:
        thread.join(60)
    assert met == [(0, "of 0")]  # at once, and once
    assert "t/verdict" in looked_at and "t/said" not in looked_at
    assert store.num_keys() == 0


def test_a_rank_of_many_looks_seldom():
    """Each of 4,096 would have looked 19 times in the first half second."""
    counting = Counting(HashStore())
    with pytest.raises(TransportError, match="heard nothing from rank 0"):
        Exchange(counting, 1, 4096, 0.5).hear("it", "rank 0")
    assert 3 < counting.counts[LOOK] < 15
