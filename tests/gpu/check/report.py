"""The report: plain text, written anew after each section, so that what was found is there whatever happens next."""

import os
from pathlib import Path

from .run import FAIL, NOT_RUN, PASS

WIDTH = 110


class Report:
    def __init__(self, path, head):
        self.path, self.head, self.outcomes = Path(path), list(head), []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def add(self, outcome):
        self.outcomes.append(outcome)
        self.write()

    def verdict(self):
        counts = {v: sum(o.verdict == v for o in self.outcomes) for v in (PASS, FAIL, NOT_RUN)}
        return ", ".join(f"{n} {v}" for v, n in counts.items())

    def write(self, done=False):
        lines = ["c10d-custom: scripts/gpu_check", "", *self.head, "", "Summary", "-" * WIDTH]
        lines += [summary_line(outcome) for outcome in self.outcomes]
        lines += [
            "-" * WIDTH,
            self.verdict() if done else f"{self.verdict()} so far: the run was not over when this was written",
            "",
        ]
        for outcome in self.outcomes:
            lines += [
                f"== {outcome.name} " + "=" * max(3, WIDTH - 4 - len(outcome.name)),
                summary_line(outcome),
                "",
                outcome.output.rstrip("\n"),
                "",
            ]
        temporary = self.path.with_name(f".{self.path.name}.part")
        temporary.write_text("\n".join(lines), errors="replace")
        os.replace(temporary, self.path)


def summary_line(outcome):
    return f"{outcome.verdict:<8} {outcome.seconds:>6.1f} s  {outcome.name:<40} {outcome.reason}".rstrip()
