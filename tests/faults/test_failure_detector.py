"""What ranks over hosts hear of each other's end, and whom they name: the failure detector alone, in processes of one
machine whose hosts are made up. With whole jobs: mpi/test_faults.py, mpi/test_who_was_first.py."""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import HashStore

from c10d_custom import native
from c10d_custom.creation import Processes
from c10d_custom.creation.exchange import Exchange
from c10d_custom.errors import AbortedError
from c10d_custom.native import over_hosts
from c10d_custom.transport.hosts import detector_links
from c10d_custom.transport.hosts.detector_links import Neighbours
from c10d_custom.transport.hosts.failure_detector import FailureDetector

SECONDS = 30.0  # for what takes milliseconds
NEVER = 1000.0  # s
# s, between two ends: each core passes on what was sent on it, and may be late with it where it has other work, so that
# ends of the same millisecond come in either order. torchrun looks for ranks that have ended every 100 ms.
GAP = 0.05

# Says ["up", rank, pid], then ["fault", rank, status, peer], and on SIGUSR2 ["ended", rank, ranks]; on SIGUSR1 a rank
# leaves, on SIGTERM it ends without a word.
PROGRAM = """
import json, os, signal, sys
from torch.distributed import FileStore
from c10d_custom.creation.exchange import Exchange
from c10d_custom.transport.hosts import failure_detector

def say(*words):
    os.write(1, (json.dumps(words) + "\\n").encode())

def be(rank):
    def leave(*_):
        detector.leave()
        detector.close()
        os._exit(0)
    store = FileStore(sys.argv[1], size)
    detector = failure_detector.FailureDetector(
        Exchange(store, rank, size, 60.0), hosts, lambda fault: say("fault", rank, fault.status, fault.peer)
    )
    signal.signal(signal.SIGUSR1, leave)
    signal.signal(signal.SIGUSR2, lambda *_: say("ended", rank, sorted(detector.ended)))
    say("up", rank, os.getpid())
    while True:
        signal.pause()

hosts, failure_detector._WORD = json.loads(sys.argv[2]), float(sys.argv[3])
size = sum(map(len, hosts))
for rank in range(size):
    if os.fork() == 0:
        be(rank)
while True:
    pid, _ = os.wait()
    open(f"{sys.argv[1]}.{pid}", "w").close()
"""


def state(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]


def _wait_until(there):
    until = time.monotonic() + SECONDS
    while not there():
        assert time.monotonic() < until
        time.sleep(1e-3)


class Ranks:
    """``word``: s, for the word of who watches a host."""

    def __init__(self, folder, hosts, word=NEVER):
        command = [sys.executable, "-c", PROGRAM, folder / "store", json.dumps(hosts), str(word)]
        self._program = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._selector, self._unread = selectors.DefaultSelector(), b""
        self._selector.register(self._program.stdout, selectors.EVENT_READ)
        self.pids, self.faults, self.ended = {}, {}, {}
        self._folder, self._size = folder, sum(map(len, hosts))

    def __enter__(self):
        self._hear(lambda: len(self.pids) == self._size)
        return self

    def __exit__(self, *_):
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        self._program.kill()
        self._program.wait()
        self._program.stdout.close()

    def signal(self, number, *ranks):
        for rank in ranks:
            os.kill(self.pids[rank], number)

    def kill(self, *ranks):
        """One after the other, each when the parent of the one before has seen its end, and the GAP is over."""
        for rank in ranks:
            self._end(rank, signal.SIGKILL)
            time.sleep(GAP)

    def leave(self, rank):
        self._end(rank, signal.SIGUSR1)

    def _end(self, rank, number):
        self.signal(number, rank)
        _wait_until((self._folder / f"store.{self.pids.pop(rank)}").exists)

    def stop(self, *ranks):
        for rank in ranks:
            self.signal(signal.SIGSTOP, rank)
            _wait_until(lambda pid=self.pids[rank]: state(pid) == "T")

    def go_on(self, *ranks):
        self.signal(signal.SIGCONT, *ranks)

    def named(self, *ranks):
        """{rank: whom it names as lost}, once each of these does."""
        self._hear(lambda: set(ranks) <= set(self.faults))
        assert {status for status, _ in self.faults.values()} == {native.PEER_LOST}
        return {rank: self.faults[rank][1] for rank in ranks}

    def known_to_have_ended(self, rank):
        self.signal(signal.SIGUSR2, rank)
        self._hear(lambda: rank in self.ended)
        return self.ended.pop(rank)

    def _hear(self, enough):
        until = time.monotonic() + SECONDS
        while not enough():
            found = self._selector.select(until - time.monotonic())
            assert found, f"not said: pids {self.pids}, faults {self.faults}"
            *lines, self._unread = (self._unread + os.read(self._program.stdout.fileno(), 4096)).split(b"\n")
            for what, rank, *said in map(json.loads, lines):
                if what == "fault":
                    self.faults[rank] = said
                else:
                    {"up": self.pids, "ended": self.ended}[what][rank] = said[0]


TWO, THREE = [[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5]]


def others(hosts, ranks):
    return [rank for host in hosts for rank in host if rank not in ranks]


def test_a_rank_is_named_though_the_first_of_its_host_says_nothing(tmp_path):
    with Ranks(tmp_path, TWO) as ranks:
        ranks.stop(0)
        ranks.kill(1)
        assert ranks.named(2, 3) == {2: 1, 3: 1}


REST = pytest.mark.full("the same of another host, or in the other order")


@pytest.mark.parametrize(
    "lost", [(1, 0), (2, 3), *(pytest.param(two, marks=REST) for two in ((0, 1), (3, 2)))], ids=str
)
def test_of_two_that_have_ended_before_anybody_looks_the_one_that_ended_first_is_named(tmp_path, lost):
    with Ranks(tmp_path, TWO) as ranks:
        left = others(TWO, lost)
        ranks.stop(*left)
        ranks.kill(*lost)
        ranks.go_on(*left)
        assert ranks.named(*left) == dict.fromkeys(left, lost[0])


@pytest.mark.parametrize(
    "lost, watching",
    [
        ((1, 0), 4),
        ((4, 5), 2),
        *(pytest.param(*those, marks=REST) for those in (((0, 1), 4), ((3, 2), 0), ((5, 4), 2))),
    ],
    ids=str,
)
def test_who_does_not_watch_a_host_waits_for_the_word_of_who_does(tmp_path, lost, watching):
    with Ranks(tmp_path, THREE) as ranks:
        left = others(THREE, lost)
        ranks.stop(*left)
        ranks.kill(*lost)
        ranks.go_on(*(rank for rank in left if rank != watching))
        time.sleep(0.3)
        ranks.go_on(watching)
        assert ranks.named(*left) == dict.fromkeys(left, lost[0])


def test_without_that_word_it_names_whose_end_it_has_seen(tmp_path):
    with Ranks(tmp_path, THREE, word=0.2) as ranks:
        ranks.stop(2)
        ranks.kill(4)
        assert ranks.named(0, 1, 3, 5) == dict.fromkeys((0, 1, 3, 5), 4)


def test_a_rank_that_has_left_is_not_lost(tmp_path):
    with Ranks(tmp_path, THREE, word=0.1) as ranks:
        for rank in (0, 4, 2):
            ranks.leave(rank)
        time.sleep(0.4)
        for rank in (1, 3, 5):
            ranks.known_to_have_ended(rank)  # and says all it had to say
        assert ranks.faults == {}


def test_without_the_first_rank_of_its_host_a_rank_is_still_watched(tmp_path):
    with Ranks(tmp_path, TWO) as ranks:
        ranks.leave(0)
        ranks.kill(1)
        assert ranks.named(2, 3) == {2: 1, 3: 1}


def test_the_end_of_a_host_s_first_rank_is_proof_though_another_of_it_ended_before(tmp_path):
    """It has not read anything by then."""
    with Ranks(tmp_path, TWO) as ranks:
        ranks.stop(2)
        ranks.kill(3)
        assert ranks.named(0, 1) == {0: 3, 1: 3}
        time.sleep(0.2)
        ranks.kill(2)
        _wait_until(lambda: all(ranks.known_to_have_ended(rank) == [2, 3] for rank in (0, 1)))


def test_it_is_proof_though_news_came_while_it_ended(tmp_path):
    """A process may take long to end, and the others call shrink_group meanwhile: its kernel resets connections."""
    with Ranks(tmp_path, TWO) as ranks:
        ranks.stop(2)
        ranks.leave(1)
        _wait_until(lambda: 1 in ranks.known_to_have_ended(0))
        ranks.kill(2)
        _wait_until(lambda: ranks.known_to_have_ended(0) == [1, 2])


SHAPES = [[2, 2], [1, 1], [3, 1], [1, 3], [1, 1, 1], [2, 1, 1, 3], [8] * 5]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_who_is_connected_to_whom(shape):
    hosts, size = [], 0
    for count in shape:
        hosts.append(list(range(size, size + count)))
        size += count
    all_of = [Neighbours(rank, hosts) for rank in range(size)]
    pairs = {(rank, other) for rank, it in enumerate(all_of) for other in it.connects_to}
    assert pairs == {(other, rank) for rank, it in enumerate(all_of) for other in it.accepts}
    assert not pairs & {(b, a) for a, b in pairs}  # one connection each
    linked = [it.connects_to | it.accepts for it in all_of]
    firsts = {host[0] for host in hosts}
    for rank, it in enumerate(all_of):
        assert rank not in linked[rank] and it.watched <= linked[rank]
        assert it.silent == (linked[rank] & firsts if rank in firsts else set())
        assert rank in firsts or len(linked[rank]) == 2 and not it.watched
    for at, host in enumerate(hosts):
        elsewhere = [r for r in range(size) if r not in host and set(host) <= all_of[r].watched]
        assert elsewhere == [hosts[at - 1][0]]
        assert set(host) <= all_of[host[0]].watched | {host[0]}
    for gone in ({0}, *map(set, hosts)):  # whatever is heard reaches all
        left = set(range(size)) - gone
        reached, ahead = set(), [min(left)]
        while ahead:
            if (rank := ahead.pop()) not in reached:
                reached.add(rank)
                ahead += linked[rank] - gone
        assert reached == left


def test_a_rank_that_called_several_times_before_it_was_answered_is_connected(monkeypatch):
    """As where another is held up for seconds between its offer and its first look."""

    class Late(Exchange):
        def say(self, key, value):
            super().say(key, value)
            time.sleep(1.0)

    monkeypatch.setattr(detector_links, "_CONNECT_SECONDS", 0.2)
    store, made, heard = HashStore(), {}, []

    def join(rank):
        exchange = Late(store, rank, 2, 10.0)
        made[rank] = FailureDetector(exchange, [[0], [1]], heard.append)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    try:
        assert made.keys() == {0, 1}
        made[1].leave()
        _wait_until(lambda: made[0].left == {1})
        assert not heard
    finally:
        for detector in made.values():
            detector.leave()
        for detector in made.values():
            detector.close()


def test_nobody_waits_for_a_rank_that_is_known_not_to_come():
    """As shrink_group knows of those of other hosts."""
    processes = Processes(left_for=lambda: "rank 1 was lost")
    with pytest.raises(AbortedError, match="rank 1 was lost, and does not come"):
        FailureDetector(Exchange(HashStore(), 0, 2, NEVER, processes), [[0], [1]], print)


@pytest.fixture
def pair():
    """The detectors of two ranks on two hosts."""
    store, made = HashStore(), {}

    def join(rank):
        made[rank] = FailureDetector(Exchange(store, rank, 2, 60.0), [[0], [1]], print)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    yield made
    for detector in made.values():
        detector.close()


def raised(detector):
    return bool(over_hosts.lib.c10d_failure_news_came(detector.failure_news))


def test_the_alarm_is_raised_from_the_end_of_a_rank_on(pair):
    go_on = threading.Event()
    read = pair[0]._read
    pair[0]._read = lambda *event: (go_on.wait(SECONDS), read(*event))
    _wait_until(lambda: not raised(pair[0]))
    pair[1].close()
    _wait_until(lambda: raised(pair[0]))  # unread
    assert not pair[0].ended
    go_on.set()
    _wait_until(lambda: pair[0].ended == {1})
    for _ in range(100):
        assert raised(pair[0])
        time.sleep(1e-3)


def test_the_alarm_is_over_once_it_is_known_that_a_rank_has_left_in_good_order(pair):
    pair[1].leave()
    pair[1].close()
    _wait_until(lambda: pair[0].left == {1} == pair[0].ended and not raised(pair[0]))
