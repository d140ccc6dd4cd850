"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class State(IntEnum):
    """As the command's exit status: the worst of all findings."""

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
