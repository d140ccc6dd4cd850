"""A rank that is killed while MPI starts is named by every other at once, whatever it was at, and on whatever host."""

import json
import os
import random
import subprocess
import sys

import pytest

from rig import Hosts

from .installation import SCRIPTS
from .scripts.killed_while_starting import STEPS

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
        said = self.trial(victim, step, delay)
        died = said.pop(victim)
        assert died["error"] is None, died
        for one in said.values():
            assert one["error"] == "PeerLostError" and f"rank {victim}" in one["text"], (victim, step, delay, one)
            assert "has died" in one["text"] and one["at"] - died["at"] < LIMIT, (victim, step, delay, died["at"], one)


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
