"""Ranks that the test itself starts on hosts of a rig, without a launcher."""

import json
import os
import random
import select
import signal
import subprocess
import sys

# In front of each program: `init` makes the group, `say` tells the test (a dict).
PROLOGUE = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def init(backend="custom", port=0, **options):
    address = f"tcp://{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + port}"
    options.setdefault("timeout", timedelta(seconds=60))
    dist.init_process_group(backend, init_method=address, rank=RANK, world_size=SIZE, **options)
def say(**values):
    sys.stdout.write(json.dumps(values) + "\\n")
    sys.stdout.flush()
"""


class Ranks:
    """``places``: the host of each rank; ``before``: code that a rank runs first; ``wait``: their standard input stays
    open; ``behind``: a command that runs each rank's."""

    def __init__(self, hosts, places, code, before=(), python=sys.executable, wait=False, behind=()):
        port = str(random.randrange(20000, 30000))
        self.processes = []
        for rank, host in enumerate(places):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": hosts.url_address(places[0]),
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of addresses without names
            }
            first = dict(before).get(rank, "")
            self.processes.append(
                subprocess.Popen(
                    hosts.command(host, [*behind, python, "-c", f"{first}\n{PROLOGUE}\n{code}"]),
                    env=env,
                    text=True,
                    stdin=subprocess.PIPE if wait else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def line(self, rank):
        """The next that a rank says."""
        process = self.processes[rank]
        while not select.select([process.stdout], [], [], 1)[0]:
            process.send_signal(signal.SIGCONT)  # nsenter stops with what it has started, and is to see its end
        if not (said := process.stdout.readline()):
            status, _, err = self.end(rank)
            raise AssertionError(f"rank {rank} ended with status {status} and said nothing:\n{err}")
        return json.loads(said)

    def end(self, rank, seconds=150):
        """(exit status, what it said, what it wrote to stderr)"""
        out, err = self.processes[rank].communicate(timeout=seconds)
        return self.processes[rank].returncode, [json.loads(line) for line in out.splitlines()], err

    def all(self, seconds=150):
        """What each rank said, a dict; all must end well."""
        ended = [self.end(rank, seconds) for rank in range(len(self.processes))]
        assert all(status == 0 and not err and len(said) == 1 for status, said, err in ended), ended
        return [said[0] for _, said, _ in ended]
