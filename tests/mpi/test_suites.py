"""The suites that run on one host, as MPI jobs over two emulated hosts.

Each is a pytest of its own, with --job; one may be run by hand:
    pytest tests/conformance --job 3+1
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import Layout

TESTS = Path(__file__).resolve().parents[1]

# These are about what lies above the transports, which cannot tell one layout from another; random programs take long,
# and run in one layout.
ABOVE = ("against_gloo", "coalescing", "functional", "random_programs", "refusals", "sparse")
TRANSPORTS = sorted(
    f"conformance/{path.name}"
    for path in (TESTS / "conformance").glob("test_*.py")
    if path.stem.removeprefix("test_") not in ABOVE
)
TRAINING = ["ecosystem/test_ddp.py", "ecosystem/test_fsdp.py", "ecosystem/test_checkpoint.py"]
FOUR_RANKS = [
    "programs/test_programs.py::test_six_collectives",
    "programs/test_programs.py::test_ddp_model_parallel_on_cpu",
]

# One pytest for each layout, since starting one takes seconds. What lies above the transports runs in one layout, but
# for the programs of four ranks (those of two are split alike by every layout) and, with Open MPI, DDP.
RUNS = {
    "2+2": [
        "conformance",
        *TRAINING,
        "programs/test_programs.py",
        "faults/test_interrupted.py",
        "faults/test_ordinary_events.py",
        "faults/test_ended_in_a_handler.py",
        "faults/test_injection.py",
        "torch_suite",
    ],
    "3+1": [*TRANSPORTS, *FOUR_RANKS],
    "openmpi:2+2": [
        *(f"conformance/test_{name}.py" for name in ("all_reduce", "bits", "send_recv", "work")),
        TRAINING[0],
        *FOUR_RANKS,
    ],
}


@pytest.mark.skipif(Layout.chosen() is not None, reason="--job: this chooses layouts itself")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.full("the other tests here run Open MPI, too"))
        if layout.startswith("openmpi")
        else layout
        for layout in RUNS
    ],
)
def test_over_two_hosts(layout, backend):
    if reason := Layout.parse(layout).why_not():
        pytest.skip(reason)
    pytest_command = Path(sys.executable).with_name("pytest")
    command = [
        pytest_command,
        "-q",
        "--job",
        layout,
        "--backend",
        backend,
        "-p",
        "no:cacheprovider",
        "--color=no",
        *(TESTS / path for path in RUNS[layout]),
    ]
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout[-20000:]
