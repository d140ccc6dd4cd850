"""Enters the outcome of a run of the tests, pytest's JUnit files, into tests/torch_api/versions.json, under the
versions of torch and Python at hand, and the machine, which C10D_TEST_MACHINE describes where it is not what it says;
of tests of MPI, into tests/mpi/versions.json; of scripts/frameworks, into tests/ecosystem/frameworks/outcomes.json. The
tables in docs/support.md and docs/frameworks.md are made of them (doc_tables.py).

    python scripts/record_version.py whole|reduced|quick|frameworks FILE...
    python scripts/record_version.py mpi PYTHON TESTS FILE...    # of the MPI that this Python finds; TESTS: in words
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
RECORDS = TESTS / "torch_api" / "versions.json"
OF_MPI = TESTS / "mpi" / "versions.json"
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
    """What there is one record of: an MPI, a torch, a Python but for its last number, a suite, a machine."""
    python, _, without_lock = record["python"].partition("t")
    numbers = _numbers(record["torch"]), _numbers(python)[:2]
    return record.get("mpi", ""), *numbers, without_lock, record["suite"], record["machine"]


def main(suite, files, **more):
    passed, failed, skipped = map(sum, zip(*map(counted, files), strict=True))
    path = OF_MPI if more else RECORDS
    records = json.loads(path.read_text()) if path.exists() else []
    without_lock = not getattr(sys, "_is_gil_enabled", lambda: True)()
    record = {
        **more,
        "torch": VERSION,
        "suite": suite,
        "python": platform.python_version() + "t (no lock)" * without_lock,
        "machine": os.environ.get("C10D_TEST_MACHINE") or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
    }
    records = [r for r in records if _of(r) != _of(record)] + [record]
    records.sort(key=_of, reverse=True)
    path.write_text(json.dumps(records, indent=1) + "\n")


def mpi_of(python):
    """{"mpi": ..., "mpi4py": ...} of what this Python finds."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI\n"
        "name, version = MPI.get_vendor(); abi = MPI.Get_abi_version()\n"
        "print(name, '.'.join(map(str, version)) + (f', ABI {abi[0]}.{abi[1]}' if abi[0] > 0 else ''))\n"
        "print(mpi4py.__version__)"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(zip(("mpi", "mpi4py"), said, strict=True))


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
    kind, *rest = sys.argv[1:]
    if kind == "frameworks":
        frameworks(rest[0])
    elif kind == "mpi":
        main(rest[1], rest[2:], **mpi_of(rest[0]))
    else:
        main(kind, rest)
