"""A rank that is killed while MPI starts is named by every other at once, whatever it was at, and on whatever host."""

import json
import os
import random
import subprocess
import sys

import pytest

from rig import Hosts
from rig.mpi import Mpi

from .installation import SCRIPTS
from .scripts.killed_while_starting import LAUNCHED, STEPS
from .test_faults import SURVIVE

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

LIMIT = 1.0  # s: from its end to the last rank's error
SCRIPT = SCRIPTS / "killed_while_starting.py"


class Starts:
    """``ranks_per_host``: of the hosts of a rig."""

    def __init__(self, hosts, ranks_per_host):
        self.size, self.processes, first = sum(ranks_per_host), [], 0
        address = hosts.addresses[hosts.names[0]]
        for name, count in zip(hosts.names, ranks_per_host, strict=True):
            command = [sys.executable, SCRIPT, address, self.size, first, count]
            self.processes.append(
                subprocess.Popen(
                    hosts.command(name, command),
                    env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            first += count

    def __enter__(self):
        for process in self.processes:
            assert json.loads(process.stdout.readline()) == {"ready": True}
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def trial(self, victim, step, delay=0.0):
        """What each rank said."""
        line = json.dumps({"port": random.randrange(20000, 30000), "victim": victim, "step": step, "delay": delay})
        for process in self.processes:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        each = self.size // len(self.processes)
        said = [self._said(process) for process in self.processes for _ in range(each)]
        return {one["rank"]: one for one in said}

    @staticmethod
    def _said(process):
        while not (line := process.stdout.readline()).startswith("{"):  # UCX says there that nobody answers
            assert line, "the host's process has ended"
        return json.loads(line)

    def check(self, victim, step, delay=0.0):
        require_named(self.trial(victim, step, delay), victim, step, delay)


def require_named(said, victim, *when):
    """By every other rank that says something."""
    died = said.pop(victim)
    assert died["error"] is None, died
    for one in said.values():
        assert one["error"] == "PeerLostError" and f"rank {victim}" in one["text"], (victim, when, one)
        assert "has died" in one["text"] and one["at"] - died["at"] < LIMIT, (victim, when, died["at"], one)


@pytest.fixture(scope="module")
def hosts():
    with Hosts() as hosts:
        yield hosts


def test_in_each_step(hosts):
    with Starts(hosts, [2, 2]) as starts:
        for number, step in enumerate(STEPS):
            starts.check(number % 4, step)


def test_the_only_rank_of_a_host(hosts):
    with Starts(hosts, [1, 1]) as starts:
        for number, step in enumerate(STEPS):
            starts.check(number % 2, step)


@pytest.mark.full("20 more of the same")
@pytest.mark.timeout(300)
def test_at_random(hosts):
    rng = random.Random(1)
    with Starts(hosts, [2, 2]) as starts:
        for _ in range(20):
            starts.check(rng.randrange(4), rng.choice(list(STEPS)), rng.uniform(0, 0.3))


def launched(hosts, folder, victim, step, delay=0.0):
    """Under MPICH's launcher, which may end the other ranks of the victim's host with it."""
    folder.mkdir()
    trial = json.dumps({"victim": victim, "step": step, "delay": delay})
    mpi = Mpi.named("mpich")
    command = mpi.command([2, 2], [mpi.python, SCRIPT, folder, trial], hosts, flags=SURVIVE["mpich"])
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    said = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert set(said) >= ({0, 1, victim} if victim > 1 else {2, 3, victim}), (victim, step, delay, said)
    require_named(said, victim, step, delay)


def test_under_mpiexec(hosts, tmp_path):
    for number, step in enumerate(LAUNCHED):
        launched(hosts, tmp_path / str(number), number % 4, step)


@pytest.mark.full("20 more of the same")
@pytest.mark.timeout(300)
def test_at_random_under_mpiexec(hosts, tmp_path):
    rng = random.Random(2)
    for number in range(20):
        launched(hosts, tmp_path / str(number), rng.randrange(4), rng.choice(LAUNCHED), rng.uniform(0, 0.3))
