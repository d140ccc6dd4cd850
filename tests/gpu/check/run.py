"""Runs one section: a command with a limit, its output kept, none of its processes left. Standard library only."""

import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.marks import MARK, kill_marked

NOT_RUN_CODE = 3  # how a program says that it could not be tried; its last line beginning "NOT RUN:" says why
NO_TESTS_CODE = 5  # pytest's, where nothing was collected
LAST_WORDS = 6.0  # seconds from the interrupt at the limit to the kill: pytest then prints what it has

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"


@dataclass
class Outcome:
    name: str
    verdict: str
    reason: str
    seconds: float = 0.0
    output: str = ""
    cut: bool = False  # for lack of time


def run(section, context, limit):
    """``context``: what fills the command's places. The Outcome, whatever the command does."""
    command = [part.format(**context, limit=f"{limit:.0f}") for part in section.command]
    mark, began = uuid.uuid4().hex, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        outcomes, output = Path(folder, "outcomes"), Path(folder, "output")
        environment = {
            **os.environ,
            **section.settings,
            MARK: mark,
            "GPU_CHECK_OUTCOMES": str(outcomes),
            "PYTHONUNBUFFERED": "1",
            "C10D_TEST_CASE_SECONDS": "25",
            "PYTHONFAULTHANDLER": "1",
            "TMPDIR": folder,
        }
        code, late = None, False
        try:
            with open(output, "wb") as out:
                process = subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                    cwd=context["root"],
                )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                late = True
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(LAST_WORDS)
                except subprocess.TimeoutExpired:
                    pass
            finally:
                kill_marked(mark)
                process.kill()
                process.wait()
        except OSError as error:
            return Outcome(section.name, FAIL, f"could not be started: {error}")
        text = output.read_text(errors="replace")
        lines = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
    if late:  # pytest tells of failures at its end
        text += "".join(
            f"\n--- {line['test']}\n{line['reason']}\n"
            for line in lines
            if line.get("outcome") == "failed" and line["reason"] not in text
        )
    seconds = time.monotonic() - began
    verdict, reason = _judge(code, text, lines, f"stopped at its limit of {limit:.0f} s" if late else None)
    return Outcome(section.name, verdict, reason, seconds, text, late)


def _judge(code, text, lines, stopped):
    said = [line for line in text.splitlines() if line.startswith(("NOT RUN:", "SUMMARY:"))]
    last = said[-1].split(":", 1)[1].strip() if said else ""
    if lines:
        return _judge_tests(code, lines, stopped)
    if stopped:
        return FAIL, stopped
    if code == NOT_RUN_CODE:
        return NOT_RUN, last or "no reason was given"
    if code == NO_TESTS_CODE:
        return NOT_RUN, "no test was selected"
    return (PASS, last) if code == 0 else (FAIL, last or f"exit code {code}")


def _judge_tests(code, lines, stopped):
    # A test may report twice, its call and what follows it: it failed if one of them did.
    found = {}
    for line in lines:
        if "test" in line and found.get(line["test"], ("",))[0] != "failed":
            found[line["test"]] = (line["outcome"], line["reason"])
    counts = Counter(outcome for outcome, _ in found.values())
    failed = [test.split("::")[-1] for test, (outcome, _) in found.items() if outcome == "failed"]
    told = ", ".join(f"{n} {word}" for word in ("passed", "failed", "skipped") if (n := counts[word]))
    reasons = Counter(reason.removeprefix("Skipped: ") for outcome, reason in found.values() if outcome == "skipped")
    skipped = "; ".join(f"{n} skipped: {reason}" for reason, n in reasons.most_common(3))
    if stopped:
        begun = [line["begun"] for line in lines if "begun" in line and line["begun"] not in found]
        under_way = f", in {begun[-1].split('::')[-1]}" if begun else ""
        return FAIL, f"{stopped}{under_way}; {told or 'no test was over'}" + (
            f": {', '.join(failed[:5])}" if failed else ""
        )
    if failed:
        return FAIL, f"{told}: {', '.join(failed[:5])}" + (" ..." if len(failed) > 5 else "")
    if code:
        return FAIL, f"{told}, but pytest ended with {code}"
    if not counts["passed"]:
        return NOT_RUN, skipped
    return PASS, told + (f" ({skipped})" if skipped else "")
