"""The threads that complete futures, on a transport of the test's own."""

import queue
import threading
import time

import pytest

from c10d_custom.c10d.work import Completer, Work
from c10d_custom.errors import AbortedError
from c10d_custom.transport import Ticket


class _Transport:
    """Tells of operations that have ended when the test says so."""

    def __init__(self):
        self.tokens, self.ended = queue.Queue(), threading.Event()

    def next_completed(self, seconds):
        until = time.monotonic() + seconds
        while True:
            try:
                return self.tokens.get(timeout=0.01)
            except queue.Empty:
                if self.ended.is_set():
                    raise AbortedError("closed") from None
                if time.monotonic() > until:
                    return None


class _Ticket(Ticket):
    source, token, over = -1, None, False

    def done(self):
        return self.over

    def wait(self, seconds, may_run=False):
        return self.over

    def error(self):
        return None

    def withdraw(self):
        self.over = True

    def watch(self, token):
        self.token = token
        return not self.over


@pytest.fixture
def transport():
    made = _Transport()
    yield made
    made.ended.set()


def works(completer, callbacks):
    """A Work for each, whose future calls it; and their tickets."""
    tickets = [_Ticket() for _ in callbacks]
    made = [Work(completer, [t], [], None, None) for t in tickets]
    for work, callback in zip(made, callbacks):
        completer.adopt(work, eager=False)
        work.get_future().then(lambda f, callback=callback: callback())
    return made, tickets


def end(transport, ticket):
    ticket.over = True
    transport.tokens.put(ticket.token)


def test_close_waits_for_threads_that_begin_while_it_waits(transport):
    completer = Completer(transport, "completer")
    closing, said = threading.Event(), []

    def slowly(name, seconds):
        time.sleep(seconds)
        said.append(name)

    kept, tickets = works(completer, [lambda: slowly("first", 0.2), lambda: slowly("second", 0.8)])

    def others():
        closing.wait()
        time.sleep(0.1)  # close() waits for the only thread there is
        for ticket in tickets:
            end(transport, ticket)
        transport.ended.set()

    thread = threading.Thread(target=others)
    thread.start()
    closing.set()
    completer.close()
    assert said == ["first", "second"]
    thread.join()
    time.sleep(0.05)
    assert not [t for t in threading.enumerate() if t.name == "c10d_custom:completer"]


def test_a_callback_may_wait_for_a_later_operation(transport):
    completer = Completer(transport, "completer")
    second = threading.Event()
    kept, tickets = works(completer, [lambda: second.wait(5) or pytest.fail("it waits in vain"), second.set])
    for ticket in tickets:
        end(transport, ticket)
    assert second.wait(5)
    transport.ended.set()
    completer.close()


def test_threads_are_given_back_and_lent_again(transport):
    completer, said = Completer(transport, "completer"), []

    def busy():
        return [t for t in completer._threads if t.is_alive()]

    for number in range(3):
        kept, tickets = works(completer, [lambda number=number: said.append(number)])
        time.sleep(0.2)
        assert busy()  # as long as somebody is to be told
        end(transport, tickets[0])
        until = time.monotonic() + 10
        while busy() and time.monotonic() < until:
            time.sleep(0.01)
        assert said == list(range(number + 1)) and not busy()
