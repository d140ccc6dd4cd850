"""Several hosts without MPI: what torchrun starts there is refused on every rank, with a way out."""

import os
import subprocess
import sys

import pytest

from harness import Layout
from harness.job import rig_of

CODE = """
import torch.distributed as dist
try:
    dist.init_process_group("custom")
except dist.DistBackendError as error:
    print("REFUSED", error)
"""


def test_ranks_of_several_hosts_that_no_mpi_launcher_started_are_refused():
    layout = Layout.parse("1+1")
    if reason := layout.why_not():
        pytest.skip(reason)
    hosts = rig_of(layout)
    address = hosts.addresses[hosts.names[0]]
    ranks = []
    for rank, name in enumerate(hosts.names):
        # As torchrun --nnodes 2 sets them.
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": address,
            "MASTER_PORT": "29555",
        }
        ranks.append(
            subprocess.Popen(
                hosts.command(name, [sys.executable, "-c", CODE]),
                env=env,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for text in said:
        assert "REFUSED" in text and "mpirun" in text and "hosta" in text and "hostb" in text, said
