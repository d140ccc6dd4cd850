"""After a loss, the ranks that are left over several hosts hear of it in whatever they do, and go on in their processes
(shrink_group). They are started by hand: as torchrun starts them, but that it would end the rest of a host. Under
launchers: test_shrink_launchers.py; how they agree, without hosts: unit/test_survivors.py."""

from pathlib import Path

import pytest

from rig import Hosts

from .by_hand import Ranks

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

SURVIVOR = (Path(__file__).with_name("scripts") / "survivor.py").read_text()


class Job(Ranks):
    """Ranks of survivor.py; ``counts``: how many on each host."""

    def __init__(self, hosts, counts, before=()):
        places = [host for host, count in zip(hosts.names, counts) for _ in range(count)]
        super().__init__(hosts, places, SURVIVOR, before=before, wait=True)
        self.left = list(range(len(places)))

    def up(self):
        for rank in self.left:
            assert self.line(rank)["up"] == rank
        return self

    def lose(self, *ranks):
        """And the others notice."""
        for rank in ranks:
            self.tell(rank, "die")
            self.left.remove(rank)
        errors = {rank: said["lost"] for rank, said in self.ask("reduce").items()}
        assert set(errors.values()) <= {"PeerLostError"}, errors

    def ask(self, what, of=None):
        of = self.left if of is None else of
        for rank in of:
            self.tell(rank, what)
        return {rank: self.line(rank) for rank in of}

    def tell(self, rank, what):
        self.processes[rank].stdin.write(f"{what}\n")
        self.processes[rank].stdin.flush()

    def require_good_end(self):
        for rank in self.left:
            self.tell(rank, "end")
        for rank in self.left:
            status, said, err = self.end(rank)
            assert (status, said, err) == (0, [{"ended": True}], ""), (rank, status, said, err)


def require_right(said, left, within=40.0):
    """What `used` of survivor.py gives on the ranks that are left, renumbered in their old order."""
    size = len(left)
    for new, old in enumerate(sorted(left)):
        right = {
            "rank": new,
            "size": size,
            **{f"sum of {count}": True for count in (3, 3000, 300_000)},
            "message": [(new - 1) % size],
            "turned": list(range(size)),
            "gradient": [1.0 + size],
        }
        assert said[old].pop("seconds") < within, said
        assert said[old] == right, said


@pytest.fixture(scope="module")
def hosts():
    with Hosts(["hosta", "hostb", "hostc"]) as hosts:
        yield hosts


@pytest.mark.parametrize(
    "counts, losses",
    [
        pytest.param([2, 2], [[3]], id="a rank"),
        pytest.param([2, 2], [[0, 1]], id="a host, with rank 0 and its store"),
        pytest.param([1, 1, 1], [[1], [0]], id="one after another, until one is left"),
        pytest.param([3, 1], [[0], [3]], id="then one on its host", marks=pytest.mark.full("as those above")),
        pytest.param([2, 2], [[0, 2], [1]], id="of each host the first", marks=pytest.mark.full("as those above")),
        pytest.param([2, 1, 1], [[2], [0], [3]], id="several", marks=pytest.mark.full("as those above")),
        pytest.param([3, 1], [[3]], id="a host of one", marks=pytest.mark.full("as those above")),
        pytest.param([2, 2], [[2, 3], [0]], id="another host", marks=pytest.mark.full("as those above")),
    ],
)
def test_the_ranks_that_are_left_go_on(hosts, counts, losses):
    with Job(hosts, counts) as job:
        job.up()
        for lost in losses:
            job.lose(*lost)
            require_right(job.ask("shrink 30"), job.left)
        job.require_good_end()


def test_a_rank_that_does_not_come_or_cannot_be_reached_is_named_and_may_come_later(hosts):
    with Job(hosts, [2, 2]) as job:
        job.up()
        for rank, said in job.ask("shrink 2", of=[0, 1, 2]).items():
            assert (said["error"], said["groups"]) == ("CollectiveTimeoutError", True), said
            assert "rank 3 on hostb neither came nor is known to have ended" in said["text"], said
            assert f"rank {rank}: " in said["text"] and "alive" in said["text"] and said["seconds"] < 4, said
        hosts.cut("hostb")
        try:
            for rank, said in job.ask("shrink 3").items():
                assert (said["error"], said["groups"]) == ("CollectiveTimeoutError", True), said
                assert ("rank 2 on hostb" if rank < 2 else "rank 0 on hosta") in said["text"], said
                assert said["seconds"] < 6, said
        finally:
            hosts.heal("hostb")
        require_right(job.ask("shrink 30"), job.left)
        job.require_good_end()


def require_named(said, name, within=5.0):
    """``within``: s, much less than the time-out of 30."""
    for value in said.values():
        assert value["error"] == "PeerLostError" and name in value["text"] and value["seconds"] < within, said


@pytest.mark.parametrize(
    "counts, lost, name",
    [
        pytest.param([1, 1], 1, "rank 1 on hostb", id="another host"),
        pytest.param([2, 2], 3, "rank 3 on hostb", id="of two on a host"),
        pytest.param([3, 1], 1, "rank 1 on hosta", id="not the last", marks=pytest.mark.full("as those above")),
    ],
)
def test_a_member_that_is_dead_ends_the_making_of_a_group(hosts, counts, lost, name):
    with Job(hosts, counts) as job:
        job.up()
        for rank in set(job.left) - {lost}:
            job.tell(rank, "group 30")  # while it is waited for
        job.tell(lost, "die")
        job.left.remove(lost)
        require_named({rank: job.line(rank) for rank in job.left}, name)
        for what in ("group 30", "split 30"):  # and when it is dead already
            require_named(job.ask(what), name)
        for value in job.ask("destroy").values():
            assert value["error"] is None and value["seconds"] < 5.0, value
        job.require_good_end()


def test_a_rank_that_has_called_shrink_group_does_not_come_to_another(hosts):
    with Job(hosts, [2, 2]) as job:
        job.up()
        for rank in (0, 1, 2):
            job.tell(rank, "group 30")
        job.tell(3, "shrink 30")
        for rank in (0, 1, 2):
            said = job.line(rank)
            assert said["error"] == "AbortedError" and "rank 3 called shrink_group" in said["text"], said
            job.tell(rank, "shrink 30")
        require_right({rank: job.line(rank) for rank in job.left}, job.left)
        job.require_good_end()


DIES = """
import os, signal
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
"""
AT = {
    # The others are in MPI_Comm_create_group with it. The first time, the default group is made.
    "in MPI": """
from c10d_custom.transport.hosts import link
create = [link.create]
link.create = lambda *arguments: create.pop()(*arguments) if create else die()
""",
    "once it has promised": """
from c10d_custom.recovery.survivors import Survivors
make = Survivors.make
def made(self, *arguments):
    make(self, *arguments)
    die()
Survivors.make = made
""",
    "having told one of two": """
from c10d_custom.recovery.survivors import _President
def told(self, promised):
    list(self._lines.values())[0].say({"do": "keep", "name": promised.name})
    die()
_President._keep = told
""",
}


@pytest.mark.parametrize(
    "victim, at",
    [
        (3, "in MPI"),
        pytest.param(0, "in MPI", marks=pytest.mark.full("as rank 3")),
        pytest.param(3, "once it has promised", marks=pytest.mark.full("as in unit/test_survivors.py")),
        (0, "having told one of two"),
    ],
)
def test_a_rank_is_lost_while_the_others_shrink_the_group(hosts, victim, at):
    """Those that are left go on with the same ranks: without it, or, if another may have gone on with it, with it, and
    then find it lost."""
    with Job(hosts, [2, 2], before={victim: DIES + AT[at]}) as job:
        job.up()
        job.lose(1)
        job.tell(victim, "shrink 30")
        job.left.remove(victim)
        said = job.ask("shrink 30")
        if at == "having told one of two":
            for value in said.values():
                assert value["error"] in ("PeerLostError", "AbortedError") and value["groups"], said
            said = job.ask("shrink 30")
        require_right(said, job.left, within=30.0)
        job.require_good_end()
