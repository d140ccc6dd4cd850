"""A few of the trials of lost_ranks.py, which runs any number of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lane2


@pytest.mark.timeout(300)
def test_survivors_name_the_lost_rank_and_see_no_wrong_result(full):
    command = [
        sys.executable,
        Path(__file__).with_name("lost_ranks.py"),
        "--json",
        "--trials",
        "400" if full else "8",
        "--seed",
        "20",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["details"], json.dumps(result["details"], indent=1)
    assert result["survivors"] > 0 and done.returncode == 0
