"""Threads that are lent (threads.py)."""

import threading
import time

import pytest

from c10d_custom import threads


def ours(but=()):
    return [t for t in threading.enumerate() if t.name.startswith("c10d_custom:") and t not in but]


def test_one_thread_does_one_thing_after_another():
    seen = set()
    for _ in range(50):
        threads.lend(lambda: seen.add(threading.get_ident()), "c10d_custom:one").join(5)
        time.sleep(2e-3)  # until it is idle
    assert 1 <= len(seen) < 10, seen


def test_as_many_as_wait_for_each_other():
    all_there = threading.Barrier(21)
    lent = [threads.lend(lambda: all_there.wait(10), "c10d_custom:many") for _ in range(20)]
    all_there.wait(10)
    for each in lent:
        each.join(5)
        assert not each.is_alive() and not each.is_here()


def test_at_once_from_many_threads():
    done, count, lock = threading.Event(), [0], threading.Lock()

    def errand():
        with lock:
            count[0] += 1
            if count[0] == 400:
                done.set()

    def ask():
        for _ in range(50):
            threads.lend(errand, "c10d_custom:crowd")

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for thread in asking:
        thread.start()
    assert done.wait(20), count
    for thread in asking:
        thread.join()


def test_idle_ones_end(monkeypatch):
    monkeypatch.setattr(threads, "_IDLE", 0.1)
    before = [t for t in ours() if t.name == "c10d_custom:guard"]  # of other tests' groups, which are not lent
    threads.lend(lambda: None, "c10d_custom:ends").join(5)
    until = time.monotonic() + 10
    while ours(before) and time.monotonic() < until:
        time.sleep(0.05)
    assert not ours(before) and not threads._idle
    lent, here = [], []
    begins = threading.Event()
    lent.append(threads.lend(lambda: begins.wait(5) and here.append(lent[0].is_here()), "c10d_custom:again"))
    begins.set()
    lent[0].join(5)
    assert here == [True] and not lent[0].is_here()


def test_an_errand_for_which_there_is_no_thread_is_not_done_later(monkeypatch):
    def refuse(target, name):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start", refuse)
    monkeypatch.setattr(threads, "_idle", threads.deque())
    done = []
    with pytest.raises(RuntimeError, match="new thread"):
        threads.lend(lambda: done.append(1), "c10d_custom:none")
    assert not threads._errands and not done


def test_a_wait_yields_for_as_long_as_it_is_told_to_and_then_sleeps_less_and_less_often(monkeypatch):
    said = []
    monkeypatch.setattr(threads.os, "sched_yield", lambda: said.append("yields"))
    monkeypatch.setattr(threads.time, "sleep", said.append)
    monkeypatch.setattr(threads, "_spin", lambda: 1e-3)
    kind = threads.Waiting(awake=2.0, often=1e-4, patience=0.5, rarely=1e-2)
    for waited in (0.0, 1.9e-3, 2.1e-3, 0.4, 0.6):
        threads.rest(kind, waited)
    assert said == ["yields", "yields", 1e-4, 1e-4, 1e-2]


def test_a_wait_ends_with_the_answer_or_with_the_last_one_once_its_time_is_over(monkeypatch):
    now, answers = [0.0], iter([0, 0, "news", "more"])
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threads.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    kind = threads.Waiting(awake=0.0, often=0.25, patience=1.0)
    assert threads.wait_until(lambda: next(answers), kind, 60.0) == "news" and now == [0.5]
    assert threads.wait_until(lambda: "", kind, 1.0) == "" and now == [1.5]
    assert threads.wait_until(lambda: now[0] > 1.5, kind, 0.1), "it looks once more after its last rest"
