"""torchrun --max-restarts over two hosts: a rank is killed, the job starts again and goes on from its checkpoint."""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from harness import Layout
from harness.job import rig_of
from programs.launch import start

ELASTIC = Path(__file__).with_name("scripts") / "elastic.py"


def shared_memory(hosts):
    """What lies in /dev/shm: other tests' MPI jobs, killed by their launchers, may have left files on these hosts."""
    return {
        (name, file)
        for name in hosts.names
        for file in os.fsdecode(hosts.run(name, ["ls", "/dev/shm"], capture_output=True).stdout).split()
    }


def right():
    w = torch.arange(300_000)
    for step in range(6):
        w = (w + sum((w * (rank + 2) + step) % 1009 for rank in range(4))) % 1009
    return w.tolist()


@pytest.mark.parametrize(
    "victim", [3, pytest.param(0, marks=pytest.mark.full("the loss of another rank takes the same way"))]
)
def test_a_killed_rank_is_named_and_the_job_restarts(victim, tmp_path, record_property):
    layout = Layout.parse("torchrun:2+2")
    if reason := layout.why_not():
        pytest.skip(reason)
    hosts = rig_of(layout)
    before = shared_memory(hosts)
    rendezvous = f"{hosts.addresses['hosta']}:{random.randrange(20000, 30000)}"
    flags = ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous, "--rdzv-id", "one"]
    result = start([ELASTIC, tmp_path, victim], layout=layout, address=False, flags=flags, deadline=90)
    assert result.code == 0 and not result.left_over, str(result)

    lost = [json.loads(path.read_text()) for path in tmp_path.glob("lost.*")]
    # Its neighbour may have been ended by torchrun before it could say anything.
    other_host = {2, 3} if victim < 2 else {0, 1}
    assert other_host <= {said["rank"] for said in lost} <= set(range(4)) - {victim}, f"{lost}\n{result}"
    for said in lost:
        assert said["error"] == "PeerLostError", said
        assert f"rank {victim} on host{'a' if victim < 2 else 'b'}" in said["text"], said

    wanted = {"first": 3, "w": right()}
    for rank in range(4):
        assert json.loads((tmp_path / f"done.{rank}").read_text()) == wanted, str(result)
    assert shared_memory(hosts) <= before
    ended = max((tmp_path / f"done.{rank}").stat().st_mtime for rank in range(4)) - (tmp_path / "died").stat().st_mtime
    named = max(said["seconds"] for said in lost)
    record_property(
        "figures", f"the loss was named after {named:.2f} s, the job started again had ended {ended:.1f} s after it"
    )
