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
TRAINING = ["ecosystem/test_ddp.py", "ecosystem/test_fsdp.py", "ecosystem/test_checkpoint.py"]
FOUR_RANKS = ["programs/test_programs.py::test_six_collectives",
              "programs/test_programs.py::test_ddp_model_parallel_on_cpu"]

# The programs have two ranks but for two: those of two are split alike by every layout.
RUNS = [
    ("2+2", "conformance", ["conformance"]),
    ("3+1", "conformance", ["conformance"]),
    ("openmpi:2+2", "conformance", [f"conformance/test_{name}.py" for name in (
        "all_reduce", "all_gather", "bits", "groups", "send_recv", "work")]),
    ("2+2", "training", TRAINING),
    ("3+1", "training", TRAINING),
    ("openmpi:3+1", "training", TRAINING[:2]),
    ("2+2", "programs", ["programs/test_programs.py"]),
    ("3+1", "programs", FOUR_RANKS),
    ("openmpi:2+2", "programs", FOUR_RANKS),
]


@pytest.mark.skipif(Layout.chosen() is not None, reason="--job: this chooses layouts itself")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout, paths", [(layout, paths) for layout, _, paths in RUNS],
                         ids=[f"{layout}-{what}" for layout, what, _ in RUNS])
def test_over_two_hosts(layout, paths, backend):
    if reason := Layout.parse(layout).why_not():
        pytest.skip(reason)
    pytest_command = Path(sys.executable).with_name("pytest")
    command = [pytest_command, "-q", "--job", layout, "--backend", backend, "-p", "no:cacheprovider", "--color=no",
               *(TESTS / path for path in paths)]
    done = subprocess.run(command, cwd=TESTS.parent, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace")
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout[-20000:]
