"""The report: NAME.txt for people, NAME.json for programs (scripts/doc_tables.py, say), written anew whenever there is
something new, each at one stroke: whatever ends the check, what it had found by then is there."""

import json
import os
from pathlib import Path

from .run import FAIL, NOT_RUN, PASS, RUNNING

WIDTH = 110
FORMAT = 1


class Report:
    """``head``: what the check is of, by the keys of HEAD; ``data``: a folder whose *.json the second takes in."""

    HEAD = ("preset", "date", "commit", "sources", "device", "gpus", "kind", "options", "settings")

    def __init__(self, folder, name, head, data):
        self.text, self.json = Path(folder, f"{name}.txt"), Path(folder, f"{name}.json")
        self.head, self.outcomes, self._data = head, [], Path(data)
        self.text.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def add(self, outcome):
        """In the place of the one of this name, if that is the last."""
        if self.outcomes and self.outcomes[-1].name == outcome.name:
            self.outcomes.pop()
        self.outcomes.append(outcome)
        self.write()

    def verdict(self):
        counts = {v: sum(o.verdict == v for o in self.outcomes) for v in (PASS, FAIL, NOT_RUN, RUNNING)}
        return ", ".join(f"{n} {v}" for v, n in counts.items() if n or v != RUNNING)

    def write(self, over=False):
        _at_one_stroke(self.text, self._as_text(over))
        _at_one_stroke(self.json, self._as_json(over))

    def _as_text(self, over):
        lines = ["c10d-custom: scripts/gpu_check", ""]
        lines += [f"{key:<9}{self.head[key]}" for key in self.HEAD]
        lines += ["", "Summary", "-" * WIDTH, *map(summary_line, self.outcomes), "-" * WIDTH]
        lines += [
            self.verdict() if over else f"{self.verdict()} so far: the run was not over when this was written",
            "",
        ]
        for outcome in self.outcomes:
            lines += [f"== {outcome.name} " + "=" * max(3, WIDTH - 4 - len(outcome.name)), summary_line(outcome), ""]
            lines += [outcome.output.rstrip("\n"), ""]
        return "\n".join(lines)

    def _as_json(self, over):
        parts = [
            {"name": o.name, "verdict": o.verdict, "reason": o.reason, "seconds": round(o.seconds, 1)}
            for o in self.outcomes
        ]
        words = {"format": FORMAT, **{key: self.head[key] for key in self.HEAD}, "over": over, "parts": parts}
        return json.dumps({**words, "data": self.data()}, indent=1)

    def data(self):
        """What the parts have left: each writes its file at one stroke, too."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self._data.glob("*.json"))}


def _at_one_stroke(path, text):
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, errors="replace")
    os.replace(part, path)


def summary_line(outcome):
    return f"{outcome.verdict:<8} {outcome.seconds:>6.1f} s  {outcome.name:<40} {outcome.reason}".rstrip()
