"""Enters the outcome of a run of the tests, pytest's JUnit files, into tests/torch_api/versions.json, under the
versions of torch and Python at hand, and the machine; of tests/mpi in it, under those of each MPI, into
tests/mpi/versions.json; of scripts/frameworks, into tests/ecosystem/frameworks/outcomes.json. The tables in
docs/support.md and docs/frameworks.md are made of them (doc_tables.py).

    python scripts/record_version.py whole|reduced|quick|mpi|frameworks FILE...
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
RECORDS = TESTS / "torch_api" / "versions.json"
MPIS = TESTS / "mpi" / "versions.json"
OUTCOMES = TESTS / "ecosystem" / "frameworks" / "outcomes.json"
VERSION = torch.__version__.split("+")[0]


def counted(path):
    """(passed, failed, skipped) of a JUnit file."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    total, bad, skipped = (
        sum(int(s.get(name, 0)) for s in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return total - bad - skipped, bad, skipped


def _numbers(version):
    return tuple(map(int, version.split(".")))


def _of(record):
    """What there is one record of: a torch, a Python but for its last number, a suite, a machine."""
    python, _, without_lock = record["python"].partition("t")
    return _numbers(record["torch"]), _numbers(python)[:2], without_lock, record["suite"], record["machine"]


def main(suite, files):
    passed, failed, skipped = map(sum, zip(*map(counted, files), strict=True))
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    without_lock = not getattr(sys, "_is_gil_enabled", lambda: True)()
    record = {
        "torch": VERSION,
        "suite": suite,
        "python": platform.python_version() + "t (no lock)" * without_lock,
        "machine": os.environ.get("C10D_TEST_MACHINE", platform.machine()),
        "date": datetime.date.today().isoformat(),
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
    }
    records = [r for r in records if _of(r) != _of(record)] + [record]
    records.sort(key=_of, reverse=True)
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")


# What a test that uses another MPI is named after, and the variable that names that MPI's environment.
OTHER_MPIS = {"openmpi": "C10D_TEST_OPENMPI", "Intel MPI": "C10D_TEST_INTEL_MPI"}
MPI_SAYS = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__, MPI.Get_abi_version()[0], MPI.Get_library_version())
"""


def mpi(files):
    """One record for an MPI, by its version and binary interface, of the tests that use it."""
    outcomes = {}  # {variable, or None for the environment's own MPI: [(file, what became of it) of each test]}
    for case in (case for file in files for case in ElementTree.parse(file).getroot().iter("testcase")):
        if case.get("classname", "").startswith("tests.mpi."):
            which = next((variable for word, variable in OTHER_MPIS.items() if word in case.get("name")), None)
            outcome = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
            outcomes.setdefault(which, []).append((case.get("classname"), outcome))
    records = json.loads(MPIS.read_text()) if MPIS.exists() else []
    for which, tests in outcomes.items():
        seen = [outcome for _, outcome in tests]
        if "passed" not in seen:
            continue
        python = Path(os.environ[which], "bin", "python") if which else sys.executable
        said = subprocess.run([python, "-c", MPI_SAYS], capture_output=True, text=True, check=True).stdout
        mpi4py, abi, library = said.split(maxsplit=2)
        name, version = re.match(r"(MPICH|Open MPI|Intel\(R\) MPI)\D*([\d.]*\d)", library).groups()
        record = {
            "mpi": f"{name.replace('(R)', '')} {version}",
            "abi": "the standard's" if int(abi) > 0 else "its own",
            "mpi4py": mpi4py,
            "torch": VERSION,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "files": len({file for file, _ in tests}),
            "passed": seen.count("passed"),
            "failed": seen.count("failure") + seen.count("error"),
            "skipped": seen.count("skipped"),
            "date": datetime.date.today().isoformat(),
        }
        records = [r for r in records if any(r[k] != record[k] for k in ("mpi", "abi", "machine"))] + [record]
    records.sort(key=lambda r: (r["machine"] != "x86_64", r["mpi"], r["abi"]))
    MPIS.write_text(json.dumps(records, indent=1) + "\n")


def frameworks(file):
    """One record for a case of a framework, a way to ask for the backend, and a torch."""
    rows = []
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        row = {p.get("name"): p.get("value") for p in case.iter("property")}
        if row:
            rows.append(row | {"torch": VERSION, "date": datetime.date.today().isoformat()})
    known = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else []
    again = {(r["framework"], r["torch"]) for r in rows}
    rows += [r for r in known if (r["framework"], r["torch"]) not in again]
    rows.sort(key=lambda r: (r["framework"], r["torch"]))  # cases of one stay in the table's order
    OUTCOMES.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    suite, *files = sys.argv[1:]
    if suite == "frameworks":
        frameworks(*files)
    elif suite == "mpi":
        mpi(files)
    else:
        main(suite, files)
