"""After a loss, the ranks that are left go on in their processes (shrink_group), under launchers, where these let them:
MPICH's with -disable-auto-cleanup, Open MPI's with --with-ft ulfm, torchrun on the hosts that have lost no rank."""

import json
import os
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from harness import Layout
from harness.job import end, launch
from harness.marks import MARK
from programs.launch import LAUNCHER_VARIABLES, start

from .test_faults import SURVIVE
from .test_shrink import require_right

SURVIVOR = Path(__file__).with_name("scripts") / "survivor.py"


def usable(layout):
    layout = Layout.parse(layout)
    if reason := layout.why_not():
        pytest.skip(reason)
    return layout


def said(folder):
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def require_gone_on(ranks):
    for value in ranks.values():
        assert value.pop("lost") in ("PeerLostError", "AbortedError"), ranks
    require_right(ranks, list(ranks), within=30.0)


@pytest.mark.parametrize(
    "layout, lost",
    [
        pytest.param("2+2", [3], id="mpich: a rank"),
        pytest.param("2+2", [0, 1], id="mpich: rank 0's host", marks=pytest.mark.full("as by hand")),
        pytest.param("openmpi:2+2", [3], id="openmpi: a rank"),
        pytest.param("openmpi:2+2", [0, 1], id="openmpi: rank 0's host", marks=pytest.mark.full("as by hand")),
    ],
)
def test_under_mpi_s_launchers(layout, lost, tmp_path):
    layout = usable(layout)
    command = [SURVIVOR, tmp_path, ",".join(map(str, lost))]
    result = start(command, layout=layout, address=False, flags=SURVIVE[layout.mpi], deadline=120)
    ranks = said(tmp_path)
    # MPICH's launcher was seen to end the ranks of the lost one's host with it.
    elsewhere = {0, 1} if lost == [3] else {2, 3}
    assert elsewhere <= set(ranks) <= set(range(4)) - set(lost), (ranks, str(result))
    require_gone_on(ranks)


def test_under_torchrun_the_other_hosts_go_on(tmp_path):
    """It ends what is left of the lost one's host, and in the end waits for that host's own, which this does not."""
    layout, mark = usable("torchrun:2+2"), uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    flags = ["--max-restarts", "0", "--monitor-interval", "0.1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = launch(layout, [SURVIVOR, tmp_path, "3"], {**environment, MARK: mark, "OMP_NUM_THREADS": "1"}, flags, **quiet)
    try:
        until = time.monotonic() + 150  # alone it takes 12 s, beside much else 60
        while not {0, 1} <= set(said(tmp_path)) and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        end(job, mark)
    ranks = said(tmp_path)
    assert set(ranks) == {0, 1}, ranks
    require_gone_on(ranks)
