"""MPICH between hosts whose ranks cannot share memory by its means: each in a container of its own, behind a strict
seccomp filter, with little room in /dev/shm. By hand, as under torchrun, and under mpiexec."""

import subprocess
import sys

import pytest

from rig import Hosts
from rig.mpi import Mpi

from .by_hand import Ranks
from .installation import SCRIPTS

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

PLACES = ["hosta", "hosta", "hostb"]
UNSHARED = {
    "pid, mount and ipc": ["unshare", "-m", "-p", "-f", "-i", "--mount-proc"],
    "pid": ["unshare", "-p", "-f", "--mount-proc"],
    "user": ["unshare", "-U", "-r"],
}
REFUSING = [sys.executable, SCRIPTS / "refusing.py", "process_vm_readv,process_vm_writev,ptrace"]
USE = """
init(timeout=timedelta(seconds=40))
x = torch.arange(300_000) * (RANK + 1)
dist.all_reduce(x)
say(right=bool((x == torch.arange(300_000) * 6).all()))
dist.destroy_process_group()
"""
LAUNCHED = """
import torch, torch.distributed as dist
dist.init_process_group("custom")
x = torch.ones(300_000)
dist.all_reduce(x)
print("right" if (x == dist.get_world_size()).all() else "wrong", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts() as hosts:
        yield hosts


@pytest.fixture
def room(hosts):
    """Gives hostb's /dev/shm a size."""
    yield lambda size: hosts.run("hostb", ["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)
    hosts.run("hostb", ["mount", "-o", "remount,size=1g", "/dev/shm"], check=True)


@pytest.mark.parametrize("behind", [*UNSHARED.values(), REFUSING], ids=[*UNSHARED, "process_vm_readv refused"])
def test_by_hand(hosts, behind):
    with Ranks(hosts, PLACES, USE, behind=behind) as ranks:
        assert ranks.all() == [{"right": True}] * 3


def launched(hosts, behind=()):
    """(exit status, what the ranks said) of mpiexec's job."""
    mpi = Mpi.named("mpich")
    if reason := mpi.why_not():
        pytest.skip(reason)
    ended = subprocess.run(
        mpi.command([2, 1], [*behind, mpi.python, "-c", LAUNCHED], hosts),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("kind", ["pid, mount and ipc", "user"])
def test_a_container_for_each_rank_of_mpiexec(hosts, kind):
    code, said = launched(hosts, UNSHARED[kind])
    assert code == 0 and said.count("right") == 3 and "UCX" not in said, said


def test_a_small_dev_shm(hosts, room):
    """Of some 15 MB, UCX takes a part on some ranks and finds too little on others, which ends processes."""
    room("15m")
    with Ranks(hosts, ["hostb", "hostb", "hosta"], USE) as ranks:
        assert ranks.all() == [{"right": True}] * 3


def test_a_dev_shm_that_is_too_small(hosts, room):
    room("64k")
    code = "try:\n    init()\nexcept dist.DistError as error:\n    say(error=type(error).__name__, text=str(error))"
    with Ranks(hosts, PLACES, code) as ranks:
        for said in ranks.all():
            assert said["error"] == "TransportError", said
            assert "hostb: rank 2: /dev/shm has 0.1 MB left" in said["text"] and "1.1 MB here" in said["text"], said


def test_a_dev_shm_that_is_too_small_under_mpiexec(hosts, room):
    """The other host's ranks, which wait for that one in MPI_Init, are ended with it."""
    room("64k")
    code, said = launched(hosts)
    assert code and "TransportError: MPI cannot start: /dev/shm has 0.1 MB left" in said, said
