"""Command lines of torchrun, on this machine or over the hosts of a rig: with the methods of Mpi (mpi.py)."""

import random
import sys
import tempfile
from pathlib import Path

AGENTS = Path(__file__).with_name("agents.py")


class Torchrun:
    name = "torchrun"

    def __init__(self):
        self.python = Path(sys.executable)

    def why_not(self):
        return None

    def environment(self, base):
        return dict(base)

    def command(self, ranks_per_host, argv, hosts=None, forward=(), flags=()):
        """As Mpi.command; argv begins with python. ``forward``: variables that they get of its environment."""
        assert Path(argv[0]) == self.python, argv
        ranks_per_host = [count for count in ranks_per_host if count]
        address = hosts.addresses[hosts.names[0]] if hosts else "127.0.0.1"
        # Below the ports that the kernel chooses. Nobody on a rig's hosts has one of these but another of its jobs.
        port = random.randrange(20000, 30000)
        agents = [
            [
                *(self.python, "-m", "torch.distributed.run"),
                *("--nnodes", len(ranks_per_host), "--node-rank", i, "--nproc-per-node", count),
                *("--master-addr", address, "--master-port", port),
                *flags,
                "--no-python",  # or it would add -u, with which print writes a line in pieces
                *argv,
            ]
            for i, count in enumerate(ranks_per_host)
        ]
        if hosts is None:
            return [str(word) for word in agents[0]]
        line = [self.python, AGENTS, hosts.ssh, tempfile.gettempdir()]
        line += forward
        for host, agent in zip(hosts.names, agents):
            line += ["--", host, *agent]
        return hosts.command(None, [str(word) for word in line])
