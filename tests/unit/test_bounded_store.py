"""A call of a store that does not answer, and the end of a process that still has one under way."""

import socket
import subprocess
import sys
import time

import pytest
from torch.distributed import HashStore

from c10d_custom.creation import bounded_store
from c10d_custom.creation.bounded_store import BoundedStore
from c10d_custom.creation.exchange import Exchange
from c10d_custom.errors import TransportError
from c10d_custom.transport.hosts import failure_detector

# Its store takes the connection and says nothing. It exits with the call under way, in a thread that nobody waits for.
LEAVES = """
import sys, time
from torch.distributed import TCPStore
from c10d_custom.creation.bounded_store import answered
from c10d_custom.errors import TransportError
from datetime import timedelta
def call():
    return TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=2), wait_for_workers=False)
try:
    answered(call, 0.5)
except TransportError as error:
    assert "silent for" in str(error), error
    print("exits", flush=True)
"""


def run(silent):
    """Exit code of LEAVES; ``silent``: the store stays so, else its connection ends meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", LEAVES, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            link, _ = server.accept()
            assert process.stdout.readline() == "exits\n"
            if not silent:  # the interpreter is about to end, which takes longer
                server.close()
                link.close()
            return process.wait(60)


def test_a_process_that_exits_amid_a_call_ends_well():
    """Up to Python 3.13 a thread that returns from C++ meanwhile would abort it."""
    for _ in range(2):
        assert run(silent=False) == 0


def test_a_store_that_stays_silent_does_not_hold_up_the_exit_for_good():
    assert run(silent=True) == 0


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def test_without_a_thread_who_asks_makes_the_call(monkeypatch):
    """And the other ranks hear of it."""
    monkeypatch.setattr(bounded_store, "start_new_thread", no_thread)
    with BoundedStore(store := HashStore(), time.monotonic() + 5, "a test") as bounded:
        bounded.under("a/").set("k", "1")
        assert bounded.under("a/").get("k") == store.get("a//k") == b"1"
        with pytest.raises(TypeError):
            bounded.append("k", 1)


def test_over_hosts_a_rank_that_gets_no_thread_says_so(monkeypatch):
    monkeypatch.setattr(failure_detector.threading.Thread, "start", no_thread)
    with pytest.raises(TransportError, match=r"rank 0 gets no thread .*ulimit -u"):
        failure_detector.FailureDetector(Exchange(HashStore(), 0, 1, 5.0), [[0]])
