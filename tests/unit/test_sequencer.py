"""The turn that the queue of a transport and the fast path (backend/hosts/sequencer.h) take from each other."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from c10d_custom.errors import UsageError
from c10d_custom.native import lib
from c10d_custom.transport.tickets import Queue

EACH = 400


class Jobs:
    def __init__(self):
        self.begun, self.under_way = [], 0
        self.queue = Queue(self.execute, lambda token: None, "test", self)

    def interrupted_here(self):
        return self.queue.has_turn_here()

    def inside(self, operation):
        return UsageError(operation)

    def execute(self, number, call):
        self.under_way += 1
        assert self.under_way == 1, "two at a time"
        self.begun.append(number)
        if number % 16 == 0:
            time.sleep(0)  # another thread's turn
        self.under_way -= 1

    def fast_path(self):
        """As c10d_leader_fast_path does it. False: nothing was begun."""
        number = lib.c10d_sequencer_take(self.queue._sequencer)
        if not number:
            return False
        self.execute(number, None)
        if lib.c10d_sequencer_free(self.queue._sequencer):
            self.queue.wake()
        return True


def test_numbers_are_carried_out_in_order_by_whoever_takes_them():
    jobs = Jobs()

    def by_the_fast_path():
        return sum(jobs.fast_path() or jobs.queue.run(None) is None for _ in range(EACH))

    def synchronously():
        return sum(jobs.queue.run(None) is None for _ in range(EACH))

    def asynchronously():
        tickets = [jobs.queue.submit(None) for _ in range(EACH)]
        return sum(t.wait(30) for t in tickets)

    with ThreadPoolExecutor(6) as threads:
        done = [threads.submit(f) for f in (by_the_fast_path, synchronously, asynchronously) * 2]
        assert [d.result(60) for d in done] == [EACH] * 6
    assert jobs.begun == list(range(1, 6 * EACH + 1))
    assert jobs.queue.number == 6 * EACH
    jobs.queue.close()


def test_the_short_way_does_not_overtake_what_waits():
    jobs, go_on = Jobs(), threading.Event()
    execute = jobs.execute
    jobs.queue._execute = lambda number, call: (go_on.wait(30), execute(number, call))[1]
    tickets = [jobs.queue.submit(None) for _ in range(3)]
    assert not jobs.fast_path()
    go_on.set()
    assert all(t.wait(30) for t in tickets)
    assert jobs.fast_path() and jobs.begun == [1, 2, 3, 4]
    jobs.queue.close()


@pytest.mark.parametrize("calls", [2**40, 2**41, 2**63])
def test_numbers_go_on_where_the_word_has_no_more_bits_for_them(calls):
    jobs = Jobs()
    before = calls - 3
    (ctypes.c_uint64 * 2).from_address(jobs.queue._sequencer)[:] = [before << 24 & 2**64 - 1, before]
    assert jobs.queue.number == before
    assert jobs.queue.run(None) is None and jobs.fast_path()
    jobs.queue._ensure_thread = lambda: None
    tickets = [jobs.queue.submit(None) for _ in range(3)]
    assert lib.c10d_sequencer_next(jobs.queue._sequencer) == calls
    assert lib.c10d_sequencer_under_way(jobs.queue._sequencer) == calls
    lib.c10d_sequencer_free(jobs.queue._sequencer)
    jobs.queue._jobs.popleft()
    while jobs.queue.run_next():
        pass
    assert [t.done() for t in tickets] == [False, True, True]
    assert jobs.begun == [calls - 2, calls - 1, calls + 1, calls + 2] and jobs.queue.number == calls + 2
    jobs.queue.close()


def test_closing_waits_for_who_has_the_turn():
    jobs = Jobs()
    assert lib.c10d_sequencer_take(jobs.queue._sequencer) == 1
    closed = threading.Thread(target=jobs.queue.close)
    closed.start()
    closed.join(0.2)
    assert closed.is_alive()
    assert lib.c10d_sequencer_free(jobs.queue._sequencer)  # somebody waits for it
    jobs.queue.wake()
    closed.join(30)
    assert not closed.is_alive()


@pytest.mark.parametrize("issued", ["run", "submitted"])
def test_what_a_signal_handler_calls_before_the_turn_is_freed_is_refused(issued):
    """On top of a call whose collective is over, but that still has the turn, it would wait for itself."""
    jobs, heard = Jobs(), []
    call = SimpleNamespace(name="barrier")
    free = jobs.queue._free

    def interrupted():
        heard.append(jobs.queue.run(call))
        with pytest.raises(UsageError):
            jobs.queue.submit(call)
        free()
        heard.append(jobs.queue.has_turn_here())

    jobs.queue._free = interrupted
    if issued == "run":
        assert jobs.queue.run(call) is None
    else:
        jobs.queue._ensure_thread = lambda: None
        ticket = jobs.queue.submit(call)
        assert jobs.queue.run_next() and ticket.done()
    (refused, still) = heard
    assert isinstance(refused, UsageError) and still is False
    jobs.queue._free = free
    assert jobs.queue.run(call) is None and jobs.begun == [1, 2]
    jobs.queue.close()
