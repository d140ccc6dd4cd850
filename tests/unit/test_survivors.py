"""How the ranks that are left of a group over hosts agree who they are (recovery/survivors.py): ranks are
threads here, hosts are made up, connections are real, and no group is made. Real ones: mpi/test_shrink.py."""

import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from c10d_custom.errors import AbortedError, CollectiveTimeoutError, TransportError
from c10d_custom.recovery import survivors
from c10d_custom.recovery.handle import connect, serve
from c10d_custom.recovery.survivors import Promise, Survivors
from c10d_custom.transport.hosts.layout import Hosts
from c10d_custom.transport.hosts.meeting_point import MeetingPoint
from c10d_custom.transport.hosts.tcp_line import At, TcpLine

SECRET = "ab" * 32


class Dead(BaseException):
    """A rank ends here, as by SIGKILL."""


class Job:
    """Ranks 0, 1, ... with so many on each host. Each has what a transport over hosts shows of the others."""

    def __init__(self, *counts):
        self.size = sum(counts)
        self.hosts, first = [], 0
        for count in counts:
            self.hosts.append(list(range(first, first + count)))
            first += count
        self.alive = [True] * self.size
        self.olds = [self._old(rank) for rank in range(self.size)]
        reached = {str(ranks[0]): "127.0.0.1" for ranks in self.hosts}
        points = [old.cpu_transport.meeting_point for old in self.olds]
        offers = [{"port": point._server.getsockname()[1], "reached": reached} for point in points]
        for point in points:
            point.settle(offers, SECRET)
        self.outcome = {}
        self.made = {}  # name of a making -> the ranks that have come to its end

    def _old(self, rank):
        mine = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        hosts = Hosts(rank, self.hosts, mine, self.hosts[mine].index(rank), 1)
        transport = SimpleNamespace(
            rank=rank,
            size=self.size,
            hosts=hosts,
            local=SimpleNamespace(states=lambda _: [SimpleNamespace(alive=self.alive[r]) for r in hosts.here]),
            detector=SimpleNamespace(ended=set(), left=set()),
            meeting_point=MeetingPoint(rank, hosts),
            who="rank {}".format,
        )
        return SimpleNamespace(cpu_transport=transport, rank=lambda: rank, getGroupName=lambda: "0")

    def lose(self, *ranks, told=True):
        """``told``: the others' failure detectors see it."""
        for rank in ranks:
            self.alive[rank] = False
            self.olds[rank].cpu_transport.meeting_point.close()
            if told:
                for old in self.olds:
                    old.cpu_transport.detector.ended.add(rank)

    def start(self, *ranks, seconds=10.0, kind=None):
        """They call shrink_group, and say what came of it in `outcome`: a Promise, or an exception."""

        def run(rank):
            survivor = (kind or {}).get(rank, Survivor)(self, rank, seconds)
            try:
                store, new = survivor.agree()
                self.outcome[rank] = new
                self.lose(rank, told=False)  # it has left the old group
                for old in self.olds:
                    old.cpu_transport.detector.left.add(rank)
            except Dead:
                self.lose(rank)
            except BaseException as error:
                self.outcome[rank] = error
                if survivor.promised is not None:
                    self.lose(rank)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        return threads

    def run(self, *ranks, **options):
        self.outcome.clear()
        for thread in self.start(*ranks, **options):
            thread.join(30)
            assert not thread.is_alive()
        return dict(self.outcome)


class Survivor(Survivors):
    """Makes groups in which nothing is."""

    def __init__(self, job, rank, seconds):
        super().__init__(job.olds[rank], timedelta(seconds=seconds))
        self.job = job

    _connect = staticmethod(lambda address, port: None)

    def make(self, name, members, store, look):
        there = self.job.made.setdefault(name, set())
        there.add(self.rank)
        while len(there) < len(members):
            if (why := look()) is not None:
                raise TransportError(why)
            time.sleep(1e-3)
        new = SimpleNamespace(name=name, members=members, shutdown=lambda: None, cpu_transport=None)
        return Promise(name, members, store, new)


@pytest.fixture(autouse=True)
def the_dead_say_nothing(monkeypatch):
    give_up = survivors._President.give_up

    def unless_dead(self, error):
        if not isinstance(error, Dead):
            give_up(self, error)

    monkeypatch.setattr(survivors._President, "give_up", unless_dead)


def agreed(outcome, *members):
    """Whether all of the outcome is one group of those."""
    assert sorted(outcome) == list(members), outcome
    assert all(new.members == list(members) for new in outcome.values()), outcome
    return len({new.name for new in outcome.values()}) == 1


def test_a_launcher_has_time_to_end_the_other_ranks_of_a_host_that_has_lost_one(monkeypatch):
    """They are in no group that is made: MPICH crashes where one dies meanwhile."""

    class Ended(Survivor):
        def here(self):
            if time.monotonic() > self.began + 0.3:
                raise Dead
            return super().here()

    monkeypatch.setattr(survivors.launcher, "watches", lambda: True)
    job = Job(2, 2)
    job.lose(3)
    assert agreed(job.run(0, 1, 2, kind={2: Ended}), 0, 1)
    assert len(job.made) == 1


def test_a_launcher_has_half_of_a_short_time(monkeypatch):
    monkeypatch.setattr(survivors.launcher, "watches", lambda: True)
    monkeypatch.setattr(survivors, "_LAUNCHER_ENDS", 1000.0)
    job = Job(2, 2)
    job.lose(3)
    assert agreed(job.run(0, 1, 2, seconds=2.0), 0, 1, 2)


@pytest.mark.parametrize(
    "counts, lost",
    [((2, 2), [3]), ((2, 2), [0, 1]), ((2, 2), [0, 2]), ((3, 1), [0, 3]), ((1, 1, 1), [0, 2]), ((2, 2), [])],
)
def test_all_that_are_left_agree(counts, lost):
    job = Job(*counts)
    job.lose(*lost)
    left = [rank for rank in range(job.size) if rank not in lost]
    assert agreed(job.run(*left), *left)


def test_a_rank_lost_while_it_waits_or_makes_is_left_out():
    class Dies(Survivor):
        def make(self, name, members, store, look):
            raise Dead

    job = Job(2, 2)
    assert agreed(job.run(0, 1, 2, 3, kind={3: Dies}), 0, 1, 2)
    job = Job(2, 2)
    assert agreed(job.run(0, 1, 2, 3, kind={0: Dies}), 1, 2, 3)  # it presided


def test_a_rank_that_does_not_come_is_named_on_all_and_may_come_later():
    job = Job(2, 2)
    for rank, error in job.run(0, 1, 2, seconds=1.0).items():
        assert isinstance(error, CollectiveTimeoutError), error
        assert f"rank {rank}: rank 3 neither came" in str(error) and "alive" in str(error), error
    assert agreed(job.run(0, 1, 2, 3), 0, 1, 2, 3)
    job = Job(2, 2)
    for error in job.run(1, 2, 3, seconds=1.0).values():  # the one that would preside
        assert isinstance(error, CollectiveTimeoutError) and "rank 0 neither came" in str(error), error
    assert agreed(job.run(0, 1, 2, 3), 0, 1, 2, 3)


def test_a_host_is_not_taken_for_gone_because_one_of_its_ranks_is():
    job = Job(2, 2)
    job.lose(3)
    job.olds[2].cpu_transport.meeting_point.close()  # its port is refused, as by a firewall
    for error in job.run(0, 1, seconds=1.0).values():
        assert isinstance(error, CollectiveTimeoutError) and "rank 2 neither came" in str(error), error


def test_of_two_halves_that_refuse_each_other_none_goes_on():
    """As behind a firewall that rejects: nobody has seen a process of the other end."""
    job = Job(2, 2)
    for rank, old in enumerate(job.olds):
        places = old.cpu_transport.meeting_point._places
        with socket.create_server(("127.0.0.1", 0)) as server:
            nowhere = server.getsockname()
        places.update({other: nowhere for other in range(4) if (other < 2) != (rank < 2)})
    outcome = job.run(0, 1, 2, 3, seconds=1.0)
    for rank, error in outcome.items():
        assert isinstance(error, CollectiveTimeoutError), error
        other = "rank 2" if rank < 2 else "rank 0"
        assert f"{other} neither came" in str(error) and "refuses, which does not prove" in str(error), error


@pytest.mark.parametrize("told", [0, 1, 2])
def test_the_president_is_lost_with_all_promises_in_its_hand(told, monkeypatch):
    """It may have told some to go on: all do, with the same group."""
    tell = survivors._President._tell

    def dying(self, message):
        if message["do"] == "keep" and self.own.rank == 0:
            for line in list(self._lines.values())[:told]:
                line.say(message)
            raise Dead
        tell(self, message)

    monkeypatch.setattr(survivors._President, "_tell", dying)
    job = Job(2, 2)
    outcome = job.run(0, 1, 2, 3)
    assert sorted(outcome) == [1, 2, 3] and len({new.name for new in outcome.values()}) == 1, outcome
    assert outcome[1].members == [0, 1, 2, 3]


def test_the_president_is_lost_before_all_have_promised():
    """Then nobody can have been told to go on: those who had promised begin again with the others."""
    tried = []

    class Slow(Survivor):
        def make(self, name, members, store, look):
            tried.append(name)
            if len(tried) == 1:
                self.job.made.setdefault(name, set()).add(self.rank)
                while look() is None:
                    time.sleep(1e-3)
                raise TransportError("called off")
            return super().make(name, members, store, look)

    class Dies(Survivor):
        def make(self, name, members, store, look):
            super().make(name, members, store, look)
            time.sleep(0.3)
            raise Dead

    job = Job(2, 2)
    assert agreed(job.run(0, 1, 2, 3, kind={0: Dies, 3: Slow}), 1, 2, 3)
    assert len(tried) == 2


def test_who_has_promised_and_hears_no_more_goes_on_with_nothing(monkeypatch):
    tell = survivors._President._tell
    silent = threading.Event()

    def mute(self, message):
        if message["do"] == "keep":
            silent.wait(20)  # stopped, or cut off
            raise Dead
        tell(self, message)

    monkeypatch.setattr(survivors._President, "_tell", mute)
    job, doubts = Job(1, 1), []

    class Doubting(Survivor):
        def late(self):
            doubts.append(self.promised is not None)
            return super().late()

    threads = job.start(0, seconds=20.0) + job.start(1, seconds=1.5, kind={1: Doubting})
    threads[1].join(10)
    assert isinstance(job.outcome[1], CollectiveTimeoutError) and doubts == [True]
    silent.set()
    threads[0].join(10)


def test_what_fails_without_a_loss_is_the_same_error_on_all():
    class Unable(Survivor):
        def make(self, name, members, store, look):
            raise TransportError("no memory")

    outcome = Job(2, 2).run(0, 1, 2, 3, kind={2: Unable})
    assert {type(error) for error in outcome.values()} == {TransportError}
    assert all("made no group: rank 2: no memory; restart" in str(error) for error in outcome.values()), outcome


def test_a_president_that_is_interrupted_says_so():
    class Interrupted(Survivor):
        def make(self, name, members, store, look):
            raise KeyboardInterrupt

    outcome = Job(2, 2).run(0, 1, 2, 3, kind={0: Interrupted})
    assert isinstance(outcome.pop(0), KeyboardInterrupt)
    for error in outcome.values():
        assert type(error) is AbortedError and "rank 0, which presided, gave up" in str(error), error


# --- who may speak


def until(what, *lines):
    end = time.monotonic() + 5
    while not what() and time.monotonic() < end:
        for line in lines:
            line.hear()
    assert what()


def test_a_stranger_is_not_heard_and_one_at_a_dead_rank_s_port_learns_nothing():
    job = Job(1, 1)
    point = job.olds[0].cpu_transport.meeting_point
    with socket.create_connection(("127.0.0.1", point._server.getsockname()[1])) as stranger:
        lines = []
        until(lambda: lines.extend(point.answer()) or lines)
        stranger.sendall(bytes(52) + b'{"here": [], "ended": [], "promised": null}\n')
        until(lambda: lines[0].at is At.ENDED, *lines)
        lines[0].close()
    job.lose(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        point._places[1] = server.getsockname()
        call = point.call(1)
        stranger, _ = server.accept()
        with stranger:
            stranger.sendall(bytes(16))
            until(lambda: call.at is At.CALLED and call._unread, call)
            assert bytes.fromhex(SECRET) not in stranger.recv(1000)
            stranger.sendall(bytes(32))
            until(lambda: call.at is At.REFUSED, call)
        call.close()


def test_strangers_do_not_keep_the_ranks_out(monkeypatch):
    monkeypatch.setattr(survivors, "STRANGERS", 3)
    job = Job(1, 1)
    address = "127.0.0.1", job.olds[0].cpu_transport.meeting_point._server.getsockname()[1]
    strangers = [socket.create_connection(address) for _ in range(20)]
    assert agreed(job.run(0, 1), 0, 1)
    for stranger in strangers:
        stranger.close()


def test_a_forked_child_does_not_answer_for_its_parent():
    job = Job(1, 1)
    (read, write), (up, says) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says, b"x")
        os.read(read, 1)
        os._exit(0)
    os.read(up, 1)
    job.lose(0)
    call = job.olds[1].cpu_transport.meeting_point.call(0)
    try:
        until(lambda: call.at is not At.SILENT, call)
        assert call.at is At.REFUSED
    finally:
        call.close()
        os.write(write, b"x")
        os.waitpid(child, 0)


def test_what_is_no_message_ends_the_line():
    here, there = socket.socketpair()
    for link in (here, there):
        link.setblocking(False)
    called, caller = TcpLine(here, b"s", 0), TcpLine(there, b"s", 1, 0)
    until(lambda: caller.at is At.OPEN and called.at is At.OPEN, called, caller)
    assert called.peer == 1
    caller.say({"a": 1})
    assert called.hear() == [{"a": 1}]
    there.send(b"[1]\n")
    assert called.hear() == [] and called.at is At.ENDED
    called.close()
    caller.close()


@pytest.mark.parametrize("asked_for", ["1", "0"])
def test_stores_on_a_torch_without_libuv(monkeypatch, asked_for):
    """Debian's. USE_LIBUV=0 is what torch's own rendezvous needs there."""
    whole, tried = dist.TCPStore, []

    def without(*arguments, use_libuv=True, **named):
        tried.append(use_libuv)
        if use_libuv:
            raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support, run with USE_...")
        return whole(*arguments, use_libuv=False, **named)

    monkeypatch.setenv("USE_LIBUV", asked_for)
    monkeypatch.setattr(dist, "TCPStore", without)
    store = serve(5)
    store.set("key", "value")
    assert connect("127.0.0.1", store.port, 5).get("key") == b"value"
    assert (True in tried) == (asked_for == "1")
    sources = Path(survivors.__file__).parents[1].rglob("*.py")
    assert [path.name for path in sources if "TCPStore(" in path.read_text()] == [
        "tcp_store.py"
    ]  # nobody else makes one
