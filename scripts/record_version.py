"""Enters the outcome of a run of the tests, pytest's JUnit files, into tests/torch_api/versions.json, under the
versions of torch and Python at hand. The table in docs/support.md is made of it (doc_tables.py).

    python scripts/record_version.py whole|reduced FILE...
"""

import datetime
import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

RECORDS = Path(__file__).resolve().parent.parent / "tests" / "torch_api" / "versions.json"


def counted(path):
    """(passed, failed, skipped) of a JUnit file."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    total, bad, skipped = (
        sum(int(s.get(name, 0)) for s in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return total - bad - skipped, bad, skipped


def main(suite, files):
    passed, failed, skipped = map(sum, zip(*map(counted, files), strict=True))
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    version, python = torch.__version__.split("+")[0], platform.python_version()
    records = [r for r in records if (r["torch"], r["suite"]) != (version, suite)]
    records.append(
        {
            "torch": version,
            "suite": suite,
            "python": python,
            "date": datetime.date.today().isoformat(),
            "passed": passed,
            "failed": failed,
            "skipped": skipped,
        }
    )
    records.sort(key=lambda r: (tuple(map(int, r["torch"].split("."))), r["suite"]), reverse=True)
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
