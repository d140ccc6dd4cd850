"""Which network MPI takes where torchrun, or nobody, started it: of a host with several, and with IPv6 alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rig import Hosts
from rig.torchrun import Torchrun

from .by_hand import Ranks

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

LIBFABRIC = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
# A container bridge, of one address on all hosts; and a network of its own on each, of which both think it is one.
MISLEADING = """
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
ip link add container type veth peer name inside
ip link set container master docker0 up
ip link set inside up
ip link add eth1 type veth peer name nowhere
ip addr add 192.168.7.$0/24 dev eth1
ip link set eth1 up
ip link set nowhere up
"""
USE = """
init(timeout=timedelta(seconds=40))
x = torch.arange(300_000) * (RANK + 1)
dist.all_reduce(x)
from mpi4py import MPI
say(x=bool((x == torch.arange(300_000) * 3).all()), library=MPI.Get_library_version())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def misled():
    with Hosts() as hosts:
        for number, name in enumerate(hosts.names, start=1):
            hosts.run(name, ["sh", "-e", "-c", MISLEADING, str(number)], check=True)
        yield hosts


@pytest.fixture(scope="module")
def ipv6():
    with Hosts(ipv6=True) as hosts:
        yield hosts


def both(hosts, monkeypatch, environment, **options):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Ranks(hosts, hosts.names, USE, **options) as ranks:
        said = ranks.all()
    assert all(one["x"] for one in said), said
    return said[0]["library"]


@pytest.mark.parametrize("environment", [{}, LIBFABRIC], ids=["ucx", "libfabric"])
def test_of_several_networks_the_one_that_joins_the_hosts(misled, monkeypatch, environment):
    assert "MPICH" in both(misled, monkeypatch, environment)


@pytest.mark.full("an environment of 330 MB")
@pytest.mark.parametrize("network", ["misled", "ipv6"])
def test_intel_mpi(request, monkeypatch, network):
    if "C10D_TEST_INTEL_MPI" not in os.environ:
        pytest.skip("C10D_TEST_INTEL_MPI names no environment that has it (scripts/test --full makes one)")
    python = Path(os.environ["C10D_TEST_INTEL_MPI"], "bin", "python")
    assert "Intel" in both(request.getfixturevalue(network), monkeypatch, {}, python=python)


KILLED = """
import os, signal
init(timeout=timedelta(seconds=40))
x = torch.arange(300_000) * (RANK + 1)
dist.all_reduce(x)
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(3))
except dist.DistBackendError as error:
    say(x=bool((x == torch.arange(300_000) * 3).all()), error=type(error).__name__, text=str(error))
"""


@pytest.mark.parametrize(
    "environment", [{}, pytest.param(LIBFABRIC, marks=pytest.mark.full("UCX is the wheel's default"))]
)
def test_ipv6_alone_and_a_lost_rank(ipv6, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Ranks(ipv6, ipv6.names, KILLED) as ranks:
        status, said, errors = ranks.end(0)
        assert status == 0 and len(said) == 1, (status, said, errors)
        assert said[0]["x"] and said[0]["error"] == "PeerLostError" and "rank 1 on hostb" in said[0]["text"], said


@pytest.mark.full("torch's own part, over what the tests above use")
def test_torchrun_over_ipv6_alone(ipv6):
    script = Path(__file__).with_name("scripts") / "train.py"
    command = Torchrun().command([2, 2], [sys.executable, script], ipv6)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count('"digest"') == 4, done
