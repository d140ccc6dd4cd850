"""A group that is made again, of processes that the program names (dist._reconfigure, torch 2.15), over several hosts.
On one: faults/test_reconfigure.py."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from faults.regrouping import Workers
from faults.schedules import SEEDS, Pool, Schedule
from harness import Layout
from harness.job import forwarded
from programs.launch import start
from rig import Hosts
from rig.mpi import Mpi

pytestmark = [
    pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not())),
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this torch has no reconfigure"),
]


@pytest.fixture(scope="module")
def hosts():
    with Hosts(["hosta", "hostb"]) as hosts:
        yield hosts


ENVIRONMENTS = {"mpich": sys.prefix, "intel": os.environ.get("C10D_TEST_INTEL_MPI")}


@pytest.mark.parametrize(
    "first, second, mpi",
    [
        ("a", "b", "mpich"),
        pytest.param("ab", "cd", "mpich", marks=pytest.mark.full("as 1+1, with ranks that share a host")),
        pytest.param("abc", "d", "mpich", marks=pytest.mark.full("as 1+1, with ranks that share a host")),
        pytest.param("ab", "c", "intel", marks=pytest.mark.full("as MPICH's")),
    ],
)
def test_processes_of_two_hosts_make_groups(hosts, first, second, mpi):
    if (folder := ENVIRONMENTS[mpi]) is None:
        pytest.skip("C10D_TEST_INTEL_MPI names no environment that has it (scripts/test --full makes one)")
    with Workers(hosts.command, Path(folder, "bin", "python")) as workers:
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
            assert "Not known to have come" not in said["text"], said  # all have
        workers.require_group("ac")
        workers.require_group("ba")
        workers.end()


@pytest.mark.full("a refusal, with an mpirun for each process")
def test_processes_of_several_jobs_of_mpirun_are_told_so(hosts, monkeypatch):
    mpi = Mpi.named("openmpi")
    if reason := mpi.why_not():
        pytest.skip(reason)
    for name, value in mpi.environment({}).items():
        monkeypatch.setenv(name, value)

    def command(host, run):
        counts = [int(name == host) for name in hosts.names]
        return mpi.command(counts, [mpi.python, *run[1:]], hosts, forwarded(os.environ))

    with Workers(command) as workers:
        workers.start("abc", ["hosta", "hostb", "hosta"])
        workers.require_group("ac")
        for said in workers.regroup("ab").values():
            assert (
                said["error"] == "TransportError" and "an MPI launcher started each of several jobs" in said["text"]
            ), said
        workers.require_group("ca")
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


@pytest.mark.parametrize(
    "layout",
    ["torchrun:1+1", "2+1", pytest.param("openmpi:2+1", marks=pytest.mark.full("as MPICH's"))],
    ids=lambda layout: layout.replace(":", " "),
)
def test_under_launchers(layout):
    layout = Layout.parse(layout)
    if reason := layout.why_not():
        pytest.skip(reason)
    result = start([Path(__file__).with_name("scripts") / "regroup.py"], layout=layout, address=False, deadline=170)
    said = result.json_by_rank()
    size = len(said)
    assert result.code == 0 and not result.left_over and sorted(said) == list(range(size)) and size > 1, str(result)
    total = size * (size - 1) // 2
    for rank, value in said.items():
        without_0 = [[rank - 1, size - 1, total]] * (rank > 0)
        assert value["said"] == [[rank, size, total], *without_0, [size - 1 - rank, size, total]], str(result)


def test_after_a_loss_the_others_go_on(hosts):
    with Workers(hosts.command) as workers:
        workers.start("abc", ["hosta", "hosta", "hostb"])
        workers.require_group("abc")
        workers.kill("a")
        lost = workers.ask("bc", "reduce")
        assert {said["error"] for said in lost.values()} == {"PeerLostError"}, lost
        workers.require_group("cb")
        workers.end()


@pytest.fixture(scope="module")
def pool(hosts):
    with Pool(hosts.names, hosts.command) as pool:
        yield pool


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules(hosts, pool, seed):
    Schedule(pool, seed).run(6)
    for host in hosts.names:
        left = hosts.run(
            host, ["sh", "-c", "ls /dev/shm; grep c10d_custom /proc/net/unix"], capture_output=True, text=True
        )
        assert left.stdout == "", left
