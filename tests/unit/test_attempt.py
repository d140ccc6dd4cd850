"""Which start of the ranks a rank takes part in, where one store outlives them all."""

import threading
import time

import pytest
from torch.distributed import HashStore

from c10d_custom.creation import exchange as exchange_module
from c10d_custom.creation.bounded_store import Attempt, BoundedStore, SupersededError
from c10d_custom.creation.exchange import Exchange
from c10d_custom.errors import TransportError


@pytest.fixture
def store():
    return HashStore()


@pytest.fixture
def attempt(store):
    opened = []

    def of(rank, seconds=20.0):
        opened.append(BoundedStore(store, time.monotonic() + seconds, "creation"))
        return Attempt(opened[-1], rank, f"creation of group 0, rank {rank}")

    yield of
    for bounded in opened:
        bounded.close()


def test_others_take_the_name_that_rank_0_announces(attempt):
    name = attempt(0).join()
    assert attempt(1).join() == name


def test_each_start_has_a_name_of_its_own(attempt):
    assert attempt(0).join() != attempt(0).join()


def test_who_waits_in_an_earlier_attempt_changes_to_the_newer(attempt):
    first = attempt(0).join()
    late = attempt(1)
    assert late.join() == first
    late.look()
    second = attempt(0).join()
    with pytest.raises(SupersededError):
        late.look()
    assert late.join() == second


def test_a_rank_that_has_left_an_attempt_waits_for_another(attempt):
    attempt(0).join()
    late = attempt(1)
    late.join()
    joined = []
    thread = threading.Thread(target=lambda: joined.append(late.join()))
    thread.start()
    second = attempt(0).join()
    thread.join(20)
    assert joined == [second]


def test_once_all_have_met_a_newer_attempt_is_nothing_to_them(attempt):
    attempt(0).join()
    settled = attempt(1)
    settled.join()
    settled.settle()
    attempt(0).join()
    settled.look()


def test_a_rank_0_whose_job_was_started_again_is_told(attempt):
    orphan = attempt(0)
    orphan.join()
    orphan.look()
    attempt(0).join()
    with pytest.raises(TransportError, match="rank 0: the job's ranks have been started again"):
        orphan.look()


@pytest.mark.parametrize("earlier", [False, True])
def test_without_rank_0_the_error_names_it(attempt, earlier):
    late = attempt(1, seconds=0.2)
    if earlier:
        attempt(0).join()
        late.join()
    with pytest.raises(TransportError, match=r"rank 1: heard nothing from rank 0.*Not there yet: rank 0") as raised:
        late.join()
    assert ("earlier attempt" in str(raised.value)) == earlier


@pytest.mark.parametrize("how", ["decided", "gave up"])
def test_who_comes_later_finds_an_exchange_over(store, how, monkeypatch):
    """One of which something is left, that is: what all have heard is deleted."""
    monkeypatch.setattr(exchange_module, "_HEARD_SECONDS", 0.1)
    first, late = Exchange(store, 0, 2, 20.0), Exchange(store, 1, 2, 20.0)
    assert not late.is_over("place")
    if how == "decided":
        store.append("place/said", "[1, 1]\n")  # of a rank that has ended before it heard
        assert first.gather_and_decide("place", 1, sum) == 2
    else:
        first.give_up(ValueError())
    assert late.is_over("place")
