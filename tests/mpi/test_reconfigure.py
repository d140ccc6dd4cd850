"""A group that is made again, of processes that the program names (dist._reconfigure, torch 2.15), over several hosts.
On one: faults/test_reconfigure.py."""

import pytest
import torch.distributed as dist

from faults.regrouping import Workers
from rig import Hosts

pytestmark = [
    pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not())),
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this torch has no reconfigure"),
]


@pytest.fixture(scope="module")
def hosts():
    with Hosts(["hosta", "hostb"]) as hosts:
        yield hosts


@pytest.mark.parametrize(
    "first, second",
    [
        ("a", "b"),
        pytest.param("ab", "cd", marks=pytest.mark.full("as 1+1, with ranks that share a host")),
        pytest.param("abc", "d", marks=pytest.mark.full("as 1+1, with ranks that share a host")),
    ],
)
def test_processes_of_two_hosts_make_groups(hosts, first, second):
    with Workers(hosts.command) as workers:
        everyone = first + second
        workers.start(everyone, ["hosta"] * len(first) + ["hostb"] * len(second))
        workers.require_group(first)
        workers.require_group(everyone)
        workers.require_group(everyone[::-1])
        if len(everyone) > 2:
            workers.require_group(everyone[1:])  # the first stays, in no group
        workers.require_group(everyone, ordered=False)
        workers.end()


def test_one_that_came_later_cannot_join_mpi_and_is_told_so(hosts):
    """On one host it can: no MPI is used there."""
    with Workers(hosts.command) as workers:
        workers.start("ab", ["hosta", "hostb"])
        workers.require_group("ab")
        workers.start("c", ["hosta"])
        for said in workers.regroup("abc").values():
            assert said["error"] == "TransportError" and "are not in one MPI job" in said["text"], said
        workers.require_group("ac")
        workers.require_group("ba")
        workers.end()


def test_a_member_on_another_host_that_does_not_come_is_named(hosts):
    with Workers(hosts.command) as workers:
        workers.start("ab", ["hosta", "hostb"])
        for absent in "ab":
            (present,) = set("ab") - {absent}
            (said,) = workers.regroup("ab", seconds=4, callers=[present]).values()
            assert said["error"] == "TransportError" and said["seconds"] < 15, said
            _, named = said["text"].split("Not known to have come: ")
            assert workers.named(absent) in named and workers.named(present) not in named, said
        workers.require_group("ab")
        workers.end()
