"""Where memory, descriptors or threads run out: a clear error on every rank, soon, and no signal. See limits.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lane2

HERE = Path(__file__).parent
FILES = [f"{k} more files on rank {rank}" for rank in (0, 1) for k in range(6)]

# case: (what rank 0 is told, what rank 1 is told); None: all goes well
TOLD = {
    "no memory at creation": ("rank 0 cannot create shared memory: .*fallocate: Cannot allocate memory",) * 2,
    "a small address space": ("rank 1 cannot map the group's shared memory: .*Cannot allocate memory",) * 2,
    **dict.fromkeys(
        ("small files", "small files, and a signal"),
        (r"rank 0 cannot create shared memory: .*File too large; .* of more than 1024 KiB \(ulimit -f\)",) * 2,
    ),
    "small files elsewhere": (None, None),
    "a small cgroup": ("rank 0 cannot create shared memory: it takes [0-9]+ KiB, and the cgroup .* KiB left",) * 2,
    "a cgroup that fills": (r"no memory \(Cannot allocate memory; the cgroup .* has [0-9]+ KiB left\)",) * 2,
    "no memory for messages": (
        "for its messages this process got no memory .Cannot allocate memory; .* KiB left",
        "got no memory .Cannot allocate memory; .* .found by rank 0.",
    ),
    "no memory for all_to_all": (
        "for its data this process got no memory .Cannot allocate memory",
        "got no memory .Cannot allocate memory; .* .found by rank 0.",
    ),
    "no memory for large collectives": (
        "for its data this process got no memory .Cannot allocate memory",
        "got no memory .Cannot allocate memory; .* .found by rank 0.",
    ),
    "no call that makes memory for messages": (
        r"this process got no memory \(fallocate: Operation not permitted\)",
        r"got no memory \(fallocate: Operation not permitted\) .found by rank 0.",
    ),
    "no call that makes memory for large collectives": (
        r"this process got no memory \(fallocate: Operation not permitted\)",
        r"got no memory \(fallocate: Operation not permitted\) .found by rank 0.",
    ),
    "no thread for collectives": (None, None),  # who waits carries them out
    "no thread for messages": (None, None),
    "a rank that becomes another user": (None, None),
    **dict.fromkeys(FILES, ("Too many open files|too many files open",) * 2),
}
AT_CREATION = {"no memory at creation"}
NEED_ROOT = {"a rank that becomes another user", "no thread for collectives", "no thread for messages"}


@pytest.fixture(scope="module")
def results():
    done = subprocess.run([sys.executable, HERE / "limits.py", *TOLD], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", TOLD)
def test_every_rank_is_told(results, case):
    if case in NEED_ROOT and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    result = results[case]
    if isinstance(result, str):
        pytest.skip(result)
    assert not result["stuck"] and result["codes"] == [0, 0], result
    well = [said for said in result["said"] if said.get("done")]
    if case in FILES and len(well) == 2:
        return  # that was enough of them
    for said, told in zip(result["said"], TOLD[case]):
        if told is None:
            assert said.get("done"), result
        else:
            assert (
                "error" in said and said["error"].startswith("TransportError: ") and re.search(told, said["error"])
            ), result
            assert said["seconds"] < 20, result
            assert said.get("made", False) == (case.startswith("no") and case not in AT_CREATION or "fills" in case), (
                result
            )


def test_some_files_are_too_few_and_some_are_enough(results):
    well = {case: all(said.get("done") for said in results[case]["said"]) for case in FILES}
    assert (
        not well["0 more files on rank 0"] and not well["0 more files on rank 1"] and well["5 more files on rank 1"]
    ), well
