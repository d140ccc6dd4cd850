"""A pytest plugin: writes each test's outcome to a file as it comes, so that a run that is cut short has told it.

GPU_CHECK_OUTCOMES names the file. Lines are JSON: {"test", "outcome", "when", "reason"}, the reason of a failure being
its traceback, and {"begun"} for the test under way. --few N runs no more than N of the tests that need no real GPU: the
last one, and the first."""

import json
import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--few", type=int)


@pytest.hookimpl(trylast=True)  # after what -k leaves
def pytest_collection_modifyitems(config, items):
    if (few := config.getoption("few")) is not None:
        able = [i for i in items if not i.get_closest_marker("skip") and "needs_queues" not in i.fixturenames] or items
        items[:] = able if len(able) <= few else [*able[: few - 1], able[-1]]


def _write(**line):
    if path := os.environ.get("GPU_CHECK_OUTCOMES"):
        with open(path, "a") as f:
            f.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid, location):
    _write(begun=nodeid)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else report.longreprtext
        _write(test=report.nodeid, outcome=report.outcome, when=report.when, reason=reason)
