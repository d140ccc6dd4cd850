"""What the probes have found of this machine's GPU, and what follows from it: ``doctor --probe``, ``--decisions``."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..transport.cuda.answers import answers_of, driver_version, fits, keep, kept
from ..transport.cuda.decisions import QUESTIONS, TABLE, Need, decide, met
from .finding import Finding, State
from .report import COLUMNS

SECONDS = 120.0  # for all probes; most of it is the start of their processes
_IDENTITY = 40.0


def probes() -> Finding:
    """Whether this GPU was asked, and how groups order its work because of what it answered."""
    import torch

    if not torch.cuda.is_available():
        return Finding("probes", "no GPU to ask", facts={"answers": None})
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    record = kept(uuid, driver_version())
    chosen = {subject: row.choice for subject, row in decide(record and record["answers"]).items()}
    facts = {"answers": record and record["answers"], "decisions": chosen}
    if record is None:
        text = f"this GPU was not asked (doctor --probe, some two minutes): order {chosen['order']}, the default"
        return Finding("probes", text, facts=facts)
    said = ", ".join(f"{subject} {choice}" for subject, choice in chosen.items())
    return Finding("probes", f"asked on {record['date']}: {said} (doctor --decisions says why)", facts=facts)


def probe(as_json: bool) -> int:
    """Asks the first GPU, keeps its answers, prints them and what they decide. The exit status."""
    from .probes.gpu import Gpu

    last: dict[str, Any] = {}
    status = ask_and_keep(Gpu, SECONDS, _to_stderr if as_json else functools.partial(print, flush=True), last.update)
    if as_json:
        print(json.dumps(last, indent=1))
    return status


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def ask_and_keep(
    make: Callable[[], Any], seconds: float, say: Callable[[str], None], answered: Callable[[dict[str, Any]], None]
) -> int:
    """``make``: what makes a probes.gpu.Gpu, in the probes' processes; ``seconds``: for all of it. After each probe the
    answers are kept, and ``answered`` gets all that there are."""
    from .probes.every import PROBES
    from .probes.run import ask_all, identify

    state, until = State.FINE, time.monotonic() + seconds
    try:
        about = identify(make, min(_IDENTITY, seconds))
    except RuntimeError as error:
        say(f"No GPU that can be asked: {error}")
        return int(State.FAILS)
    say(f"{about['device']}, driver {about['driver'] or 'of unknown version'}")
    answers: dict[str, bool | float] = {}
    remarks: dict[str, str] = {}
    kept_or_why = ""
    for one, found in ask_all(PROBES, make, until - time.monotonic()):
        say(f"\n{one.name} ({found.seconds:.1f} s)")
        for key in one.asks:
            say(f"  {key:28} {shown(key, found.answers):>12}  {found.remarks.get(key, '')}".rstrip())
        answers.update({key: answer for key, answer in found.answers.items() if fits(key, answer)})
        remarks.update(found.remarks)
        try:
            kept_or_why = f"Kept in {keep(answers, **about)}: the groups made from now on choose by it."
        except OSError as error:
            kept_or_why, state = f"The answers could not be kept, so groups do not know them: {error}", State.REMARK
        answered({**about, "answers": dict(answers), "remarks": dict(remarks)})
    say(f"\n{decisions(answers)}\n\n{kept_or_why}")
    return int(state)


def shown(key: str, answers: Mapping[str, Any]) -> str:
    if key not in answers:
        return "open"
    answer = answers[key]
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    unit = QUESTIONS[key].unit if key in QUESTIONS else ""
    return f"{answer:g} {unit}"


def print_decisions() -> int:
    """The table, by the answers of this machine's first GPU, if there are any."""
    import torch

    answers = None
    with contextlib.suppress(RuntimeError, AssertionError):
        if torch.cuda.is_available():
            answers = answers_of(str(torch.cuda.get_device_properties(0).uuid))
    print("This machine was not asked.\n" if answers is None else "By this machine's answers:\n")
    print(decisions(answers))
    return int(State.FINE)


def decisions(answers: Mapping[str, bool | float] | None) -> str:
    """All rows of the table, a > before those that hold."""
    chosen, lines, subject = decide(answers), list[str](), ""
    for row in TABLE:
        if row.subject != subject:
            subject = row.subject
            lines.append(f"{subject}: the first of these whose needs are met")
        mark = ">" if chosen[subject] is row else " "
        lines += textwrap.wrap(
            f"{row.choice}: {row.because}", COLUMNS, initial_indent=f"{mark} ", subsequent_indent="      "
        )
        lines += [f"      {_need(need, answers or {})}" for need in (*row.needs, *row.gain)]
    return "\n".join(lines)


def _need(need: Need, answers: Mapping[str, bool | float]) -> str:
    key, relation, other = need
    wanted = f"{other:g}" if not isinstance(other, bool | str) else other if isinstance(other, str) else _word(other)
    return f"{'met' if met(need, answers) else 'not'}  {key} {relation} {wanted}  ({shown(key, answers)})"


def _word(answer: bool) -> str:
    return "yes" if answer else "no"
