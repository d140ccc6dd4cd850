"""Runs one part: a command with a limit, its output kept, none of its processes left. Standard library only."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.marks import MARK, kill_marked

NOT_RUN_CODE = 3  # how a program says that it could not be tried; its last line beginning "NOT RUN:" says why
NO_TESTS_CODE = 5  # pytest's, where nothing was collected
LAST_WORDS = 6.0  # seconds from the interrupt to the kill at the limit: pytest then prints what it has
LOOK = 2.0  # seconds from one look at a running part to the next

PASS, FAIL, NOT_RUN, RUNNING = "PASS", "FAIL", "NOT RUN", "RUNNING"


@dataclass
class Outcome:
    name: str
    verdict: str
    reason: str
    seconds: float = 0.0
    output: str = ""
    cut: bool = False  # for lack of time


class Running:
    """``context``: what fills the command's places; ``folder``: empty, for the part's temporary files; ``mark``: in its
    processes' environment."""

    def __init__(self, part, context, folder, mark):
        self.part, self._mark, self._began = part, mark, time.monotonic()
        words = (*part.command, *(part.short if context.get("short") else ()))
        self._command = [word.format(**context) for word in words]
        self._outcomes, self._output = Path(folder, "outcomes"), Path(folder, "output")
        self._root = context["root"]
        path = [context["site"], os.path.join(self._root, "tests"), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            **part.settings,
            MARK: mark,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "GPU_CHECK_OUTCOMES": str(self._outcomes),
            "PYTHONUNBUFFERED": "1",
            "C10D_TEST_CASE_SECONDS": "25",
            "PYTHONFAULTHANDLER": "1",
            "TMPDIR": str(folder),
        }

    def run(self, limit, look=lambda outcome: None):
        """The Outcome, whatever the command does, within ``limit`` seconds and what killing takes. ``look`` gets what
        it is so far, again and again."""
        end, code, late = self._began + limit, None, False
        try:
            process = self._start()
        except OSError as error:
            return Outcome(self.part.name, FAIL, f"could not be started: {error}")
        try:
            last_words = min(LAST_WORDS, limit / 3)
            while code is None and not late:
                left = end - last_words - time.monotonic()
                code, late = self._wait(process, min(LOOK, max(left, 0.0))), left <= 0
                if code is None:
                    look(self._so_far())
            if code is None:
                process.send_signal(signal.SIGINT)
                self._wait(process, last_words)
        finally:
            kill_marked(self._mark)
            process.kill()
            process.wait()
        return self._outcome(code, f"stopped at its limit of {limit:.0f} s" if late and code is None else None)

    def _start(self):
        with open(self._output, "wb") as out:
            return subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
                cwd=self._root,
            )

    def _wait(self, process, seconds):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _found(self):
        """(output, the lines of outcomes.py)"""
        lines = self._outcomes.read_text().splitlines(True) if self._outcomes.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return self._output.read_text(errors="replace"), whole

    def _so_far(self):
        text, lines = self._found()
        counts = Counter(outcome for outcome, _ in _tests(lines).values())
        told = ", ".join(f"{n} {word}" for word, n in counts.items())
        return Outcome(self.part.name, RUNNING, told, time.monotonic() - self._began, text)

    def _outcome(self, code, stopped):
        text, lines = self._found()
        if stopped:  # pytest tells of failures at its end
            text += "".join(
                f"\n--- {line['test']}\n{line['reason']}\n"
                for line in lines
                if line.get("outcome") == "failed" and line["reason"] not in text
            )
        verdict, reason = _judge(code, text, lines, stopped)
        return Outcome(self.part.name, verdict, reason, time.monotonic() - self._began, text, bool(stopped))


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


def _tests(lines):
    """{test: (outcome, reason)}. A test may report twice, its call and what follows: it failed if one of them did."""
    found = {}
    for line in lines:
        if "test" in line and found.get(line["test"], ("",))[0] != "failed":
            found[line["test"]] = (line["outcome"], line["reason"])
    return found


def _judge_tests(code, lines, stopped):
    found = _tests(lines)
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
