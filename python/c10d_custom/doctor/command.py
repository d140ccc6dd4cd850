"""``python -m c10d_custom doctor``: the command line, and the list of checks"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import finding, gpus, memory, mpi, self_test, settings, software, visibility
from .finding import Finding, State, worst

CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("package", software.package),
    ("torch", software.torch),
    ("core", software.core),
    ("sharing", visibility.sharing),
    ("host", visibility.host),
    ("memory", memory.memory),
    ("limits", memory.limits),
    ("MPI", mpi.mpi),
    ("GPUs", gpus.gpus),
    ("settings", settings.settings),
    ("replaces", settings.replaces),
)
SELF_TEST: tuple[str, Callable[[], Finding]] = ("self-test", self_test.self_test)


def add_to(commands: Any) -> None:
    """Adds the command to an argparse parser's subparsers, with what it `run`s."""
    doctor = commands.add_parser(
        "doctor",
        help="says what this machine will do, and makes a group of 2 ranks to see",
        description="Says in one screen what this machine will do, and makes a group of 2 ranks to see. Exit status: "
        "0 all is fine, 1 it works and something is worth to know, 2 it will not work here.",
    )
    doctor.add_argument("--json", action="store_true", help="prints the same as JSON")
    doctor.add_argument("--no-self-test", action="store_true", help="makes no group")
    doctor.set_defaults(run=_run)


def _run(args: Any) -> int:
    return main(args.json, not args.no_self_test)


def main(as_json: bool, with_self_test: bool) -> int:
    """Prints what was found; the exit status."""
    findings = look([*CHECKS, SELF_TEST] if with_self_test else CHECKS)
    print(finding.as_json(findings) if as_json else finding.text(findings))
    return int(worst(findings))


def look(checks: Any) -> list[Finding]:
    """What the checks have found; also what keeps one from finding anything."""
    findings = []
    for name, check in checks:
        try:
            findings.append(check())
        except Exception as error:
            findings.append(Finding(name, f"could not be looked at: {type(error).__name__}: {error}", State.REMARK))
    return findings
