"""The suites that run on one host, as jobs over two emulated hosts, that mpirun or torchrun starts.

Each is a pytest of its own, with --job; one may be run by hand:
    pytest tests/conformance --job 3+1
"""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from conformance.digests import read
from harness import Layout

pytestmark = pytest.mark.lane3

TESTS = Path(__file__).resolve().parents[1]

# These are about what lies above the transports, which cannot tell one layout from another, or inside a host; random
# programs take long, and run in one layout.
ABOVE = (
    *("against_gloo", "coalescing", "functional", "random_programs", "refusals", "shared_elements", "sparse"),
    *("threads", "zero_copy"),
)
# Those that leave digests: the bits of reductions, and each operation's sweep. What the few do between hosts, the
# others are made of.
FEW_SWEEPS = [f"conformance/test_{name}.py" for name in ("all_reduce", "bits", "broadcast", "send_recv")]
SWEEPS = [
    *FEW_SWEEPS,
    *(
        f"conformance/test_{name}.py"
        for name in ("all_gather", "all_to_all", "all_to_all_single", "gather", "reduce", "reduce_scatter", "scatter")
    ),
]
TRANSPORTS = [
    f"conformance/{path.name}"
    for path in sorted((TESTS / "conformance").glob("test_*.py"))
    if path.stem.removeprefix("test_") not in ABOVE and f"conformance/{path.name}" not in SWEEPS
]
TRAINING = ["ecosystem/test_ddp.py", "ecosystem/test_fsdp.py", "ecosystem/test_checkpoint.py"]
PROGRAMS = "programs/test_programs.py"
FOUR_RANKS = [f"{PROGRAMS}::test_{name}" for name in ("six_collectives", "ddp_model_parallel_on_cpu")]
FAULTS = [
    "faults/test_interrupted.py",
    "faults/test_ordinary_events.py",
    "faults/test_ended_in_a_handler.py",
    "faults/test_injection.py",
    "faults/test_unfit_messages.py",
    "faults/test_uneven_parts.py",
    *(
        f"faults/test_leftovers.py::test_{name}"
        for name in (
            "groups_over_hosts_leave_nothing",
            "a_group_that_failed_frees_its_memory",
            "a_later_group_gets_nothing_of_one_that_is_gone",
            "a_group_that_failed_leaves_no_keys_in_the_store",
        )
    ),
]
EVERYTHING = ["conformance", PROGRAMS, *TRAINING, *FAULTS, "torch_suite"]

# One pytest for each layout, since starting one takes seconds. Once MPI is up, the same code runs whoever started it:
# by default each suite runs once over 2+2, by torchrun or, if it takes long or has a sweep, by mpirun, and a few sweeps
# by both, for their bits; over 3+1 runs what shows that hosts of unlike size find each other. Of whole programs, those
# run whose ranks have most to tell each other.
RUNS = {
    "2+2": [*SWEEPS, "conformance/test_random_programs.py", TRAINING[0], *FAULTS],
    "3+1": SWEEPS,
    "torchrun:2+2": [
        *FEW_SWEEPS,
        *TRANSPORTS,
        *FOUR_RANKS,
        *(f"{PROGRAMS}::test_{name}" for name in ("sgd_partitioned", "ddp_checkpoint")),
        "faults/test_leftovers.py::test_a_group_leaves_no_keys_in_the_store",
        "faults/test_leftovers.py::test_mpi_gets_its_communicators_back",
        "torch_suite",
    ],
    "torchrun:3+1": ["conformance/test_all_reduce.py", "conformance/test_bits.py", *FOUR_RANKS],
    "openmpi:2+2": [
        *(f"conformance/test_{name}.py" for name in ("all_reduce", "bits", "send_recv", "work")),
        *FOUR_RANKS,
        *(
            f"faults/{name}"
            for name in ("test_unfit_messages.py", "test_leftovers.py::test_a_group_that_failed_frees_its_memory")
        ),
    ],
    # What differs from one MPI to the other: small calls and large, messages, and what becomes of a group that failed.
    "torchrun:2+2, libfabric": ["conformance/test_work.py", "faults/test_unfit_messages.py"],
    "torchrun:2+2, libfabric, everything": EVERYTHING,
    "torchrun:2+2, Intel MPI, everything": EVERYTHING,
    **{f"{layout}, everything": EVERYTHING for layout in ("2+2", "3+1", "torchrun:2+2", "torchrun:3+1")},
    "torchrun:1+1, every kind of tensor": ["--full", "torch_api/test_watched.py"],
    "2+2, many uneven calls": ["--full", "faults/test_uneven_parts.py"],
}
FULL = {run: pytest.mark.full("others run each suite once") for run in RUNS if "," in run}


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """What conformance's sweeps write: a folder of each run of `RUNS`."""
    return {run: tmp_path_factory.mktemp("digests") for run in RUNS}


@pytest.mark.skipif(Layout.chosen() is not None, reason="--job: this chooses layouts itself")
@pytest.mark.timeout(3600)
@pytest.mark.flaky(reruns=0)  # the pytest inside runs its own again
@pytest.mark.parametrize("run", [pytest.param(run, marks=FULL.get(run, ())) for run in RUNS])
def test_over_two_hosts(run, backend, digests):
    layout = run.partition(",")[0]
    if reason := Layout.parse(layout).why_not():
        pytest.skip(reason)
    python, variables = sys.executable, {}
    if "libfabric" in run:
        variables["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    if "Intel MPI" in run:
        if "C10D_TEST_INTEL_MPI" not in os.environ:
            pytest.skip("C10D_TEST_INTEL_MPI names no environment that has it (scripts/test --full makes one)")
        python = Path(os.environ["C10D_TEST_INTEL_MPI"], "bin", "python")
    command = [
        python,
        "-c",  # as the pytest command: the tests' folder is in front, not the checkout
        "import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main())",
        "-q",
        "--job",
        layout,
        "--backend",
        backend,
        "-p",
        "no:cacheprovider",
        "--color=no",
        *(path if path.startswith("-") else TESTS / path for path in RUNS[run]),
    ]
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env={**os.environ, **variables, "C10D_TEST_DIGESTS": str(digests[run])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    for again in re.findall(r"^=+ RAN AGAIN: .*?(?=^=+ )", done.stdout, re.M | re.S):
        warnings.warn(f"job {layout}: {again}", stacklevel=1)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout[-20000:]


@pytest.mark.skipif(Layout.chosen() is not None, reason="--job: this chooses layouts itself")
@pytest.mark.parametrize("layout", ["2+2", "3+1", "2+2, everything", "3+1, everything"])
def test_the_same_bits_by_torchrun(layout, digests):
    """As by mpirun, in the sweeps that run by both."""
    by_mpirun, by_torchrun = read(digests[layout]), read(digests[f"torchrun:{layout}"])
    if not by_mpirun or not by_torchrun:
        pytest.skip(f"{layout} has not run by both")
    if not layout.endswith("everything"):
        by_mpirun = {sweep: bits for sweep, bits in by_mpirun.items() if sweep in by_torchrun}
    assert by_torchrun == by_mpirun
