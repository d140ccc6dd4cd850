"""Enters the outcome of a run of the tests, pytest's JUnit files, into tests/torch_api/versions.json, under the
versions of torch and Python at hand, and the machine; of scripts/frameworks, into
tests/ecosystem/frameworks/outcomes.json. The tables in docs/support.md and docs/frameworks.md are made of them
(doc_tables.py).

    python scripts/record_version.py whole|reduced|quick|frameworks FILE...
"""

import datetime
import json
import os
import platform
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
RECORDS = TESTS / "torch_api" / "versions.json"
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
    frameworks(sys.argv[2]) if sys.argv[1] == "frameworks" else main(sys.argv[1], sys.argv[2:])
