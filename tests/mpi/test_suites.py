"""The suites that run on one host, as jobs over two emulated hosts, that mpirun or torchrun starts.

Each is a pytest of its own, with --job; one may be run by hand:
    pytest tests/conformance --job 3+1
"""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from harness import Layout

TESTS = Path(__file__).resolve().parents[1]

# These are about what lies above the transports, which cannot tell one layout from another; random programs take long,
# and run in one layout.
ABOVE = ("against_gloo", "coalescing", "functional", "random_programs", "refusals", "sparse")
TRANSPORTS, ABOVE_THEM = [], []
for path in sorted((TESTS / "conformance").glob("test_*.py")):
    (ABOVE_THEM if path.stem.removeprefix("test_") in ABOVE else TRANSPORTS).append(f"conformance/{path.name}")
# Which ranks of a host take part differs where hosts have different numbers of ranks.
WHO_TAKES_PART = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "bits",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
TRAINING = ["ecosystem/test_ddp.py", "ecosystem/test_fsdp.py", "ecosystem/test_checkpoint.py"]
FOUR_RANKS = [
    "programs/test_programs.py::test_six_collectives",
    "programs/test_programs.py::test_ddp_model_parallel_on_cpu",
]

# One pytest for each layout, since starting one takes seconds. What lies above the transports runs in one layout, but
# for the programs of four ranks (those of two are split alike by every layout) and, with Open MPI, DDP. Under torchrun
# run what shows that MPI is up, and the programs.
RUNS = {
    "2+2": [
        *TRANSPORTS,
        "conformance/test_random_programs.py",
        *TRAINING,
        "programs/test_programs.py",
        "faults/test_disagreement.py::test_a_message_that_does_not_fit",
        "faults/test_interrupted.py",
        "faults/test_ordinary_events.py",
        "faults/test_ended_in_a_handler.py",
        "faults/test_injection.py",
        "torch_suite",
    ],
    "3+1": [*(f"conformance/test_{name}.py" for name in WHO_TAKES_PART), *FOUR_RANKS],
    "torchrun:2+2": [
        *(f"conformance/test_{name}.py" for name in ("bits", "send_recv")),
        *FOUR_RANKS,
        "programs/test_programs.py::test_sgd_partitioned",
        "programs/test_programs.py::test_ddp_basic",
    ],
    "2+2, above the transports": ABOVE_THEM,
    "openmpi:2+2": [
        *(f"conformance/test_{name}.py" for name in ("all_reduce", "bits", "send_recv", "work")),
        TRAINING[0],
        *FOUR_RANKS,
    ],
}
FULL = {
    "2+2, above the transports": pytest.mark.full("it cannot tell one layout from another"),
    "openmpi:2+2": pytest.mark.full("the other tests here run Open MPI, too"),
}


@pytest.mark.skipif(Layout.chosen() is not None, reason="--job: this chooses layouts itself")
@pytest.mark.timeout(1500)
@pytest.mark.flaky(reruns=0)  # the pytest inside runs its own again
@pytest.mark.parametrize("run", [pytest.param(run, marks=FULL.get(run, ())) for run in RUNS])
def test_over_two_hosts(run, backend):
    layout = run.partition(",")[0]
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
        *(TESTS / path for path in RUNS[run]),
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
    for again in re.findall(r"^=+ RAN AGAIN: .*?(?=^=+ )", done.stdout, re.M | re.S):
        warnings.warn(f"job {layout}: {again}", stacklevel=1)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout[-20000:]
