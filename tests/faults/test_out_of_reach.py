"""Nothing that an error or an end needs is loaded only then: see out_of_reach.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import c10d_custom

HERE = Path(__file__).parent

# way: what each rank is told; None: nothing
TOLD = {
    "mismatch": ("CollectiveMismatchError: .*they differ in op.*broadcast.*all_reduce",) * 2,
    "timeout": ("CollectiveTimeoutError: .*Missing: rank 1.*last entered", "CollectiveTimeoutError: .*too late"),
    "queued": ("CollectiveTimeoutError: .*Missing: rank 1.*last entered", "CollectiveTimeoutError: .*too late"),
    "message": ("CollectiveTimeoutError: .*Did rank 1 send it, with tag 0.*has entered 0", None),
    "impatient": ("CollectiveTimeoutError: .*not done after the 0.1 s.*Did rank 1 send it", None),
    "refused": ("UsageError: .*all_gather_into_tensor",) * 2,
    "monitored": ("CollectiveTimeoutError: .*rank 1", None),
    "aborted": ("AbortedError: .*the group was aborted or destroyed",) * 2,
    "dead": (r"PeerLostError: .*rank 1 \(pid [0-9]+\) has died", None),
}


@pytest.mark.parametrize("what", ["files", "package"])
def test_every_error_is_whole(what, tmp_path):
    shutil.copytree(Path(c10d_custom.__file__).parent, tmp_path / "c10d_custom")
    done = subprocess.run(
        [sys.executable, HERE / "out_of_reach.py", what],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["stuck"] and result["codes"] == [0, 0] and result["said"][0].get("ended"), (result, done.stderr)
    for way, told in TOLD.items():
        for rank in (0, 1):
            said = result["said"][rank].get(way)
            if told[rank] is None:
                assert said is None, (way, rank, said)
            else:
                assert said and re.match(told[rank], said, re.DOTALL) and "More cannot be told" not in said, (
                    way,
                    rank,
                    said,
                )
