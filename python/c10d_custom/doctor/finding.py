"""What a check has found, and findings as one screen of text, and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from .._version import __version__


class State(IntEnum):
    """How well a check went. The worst of all findings is the command's exit status."""

    FINE = 0
    REMARK = 1  # groups work, and something about them is worth to know
    FAILS = 2  # no group can be made, or none that works


@dataclass(frozen=True)
class Finding:
    """``facts``: the same for programs, of what JSON has."""

    name: str
    text: str
    state: State = State.FINE
    facts: dict[str, Any] = field(default_factory=dict)


def worst(findings: list[Finding]) -> State:
    return max((f.state for f in findings), default=State.FINE)


COLUMNS = 100
LINES = 40
_MARKS = {State.FINE: " ", State.REMARK: "!", State.FAILS: "X"}
_FRAME = 6  # the headline, the verdict on up to three lines, and an empty line after and before


def text(findings: list[Finding]) -> str:
    body = _body(findings, 4)
    if len(body) > LINES - _FRAME:
        body = _body(findings, 2)
    return "\n".join(
        [f"c10d-custom {__version__} on this machine", "", *body, "", *textwrap.wrap(_verdict(findings), COLUMNS)]
    )


def _body(findings: list[Finding], most: int) -> list[str]:
    """``most``: the lines of a finding."""
    width = max((len(f.name) for f in findings), default=0)
    lines: list[str] = []
    for f in findings:
        lines += textwrap.wrap(
            f.text,
            COLUMNS,
            initial_indent=f"{_MARKS[f.state]} {f.name:{width}}  ",
            subsequent_indent=" " * (width + 4),
            max_lines=most,
            placeholder=" ... (--json has it all)",
            break_on_hyphens=False,
        )
    return lines


def _verdict(findings: list[Finding]) -> str:
    state = worst(findings)
    names = ", ".join(f.name for f in findings if f.state is state)
    if state is State.FINE:
        return "Everything is fine here."
    if state is State.REMARK:
        return f"It works here. Worth to know (!): {names}."
    return f"It will not work here (X): {names}."


def as_json(findings: list[Finding]) -> str:
    said = [{"name": f.name, "state": f.state.name.lower(), "text": f.text, "facts": f.facts} for f in findings]
    return json.dumps({"version": __version__, "status": int(worst(findings)), "findings": said}, indent=1)


def there(module: str, *distributions: str) -> str | None:
    """Returns the version of an installed module, or None. Nothing of it is loaded."""
    try:
        if find_spec(module) is None:
            return None
    except (ImportError, ValueError):
        return None
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"
