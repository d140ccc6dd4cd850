"""The bar for speed on one host: each row's goal, the figure measured, met or missed.

A row holds for all its cells (operations, sizes, ranks), so its figure is the worst of them; the median stands beside
it. Medians of calls, in one run by turns with what they are compared with.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from c10d_custom.bench import environment

from . import parts
from .parts import Part

KB, MB = 1 << 10, 1 << 20
OTHERS = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
ROOTED = ("reduce", "gather", "scatter")  # beyond the table: the last row only
MANY = (4, 8)  # ranks


Runs = dict[str, Any]  # by the name of a part: the JSON that it wrote
Keep = Callable[[str, int], bool]  # (operation, bytes): whether the row has it


@dataclass(frozen=True)
class Cell:
    label: str
    figure: float


@dataclass(frozen=True)
class Row:
    """``figure``s are in ``unit``; ``needs``: names of the parts that its ``cells`` come from."""

    what: str
    against: str
    goal: float
    least: bool  # the figure must be at least the goal; else at most
    unit: str
    needs: tuple[str, ...]
    cells: Callable[[Runs], list[Cell]]

    def worst(self, cells: list[Cell]) -> Cell:
        return (min if self.least else max)(cells, key=lambda c: c.figure)

    def met(self, figure: float) -> bool:
        return figure >= self.goal if self.least else figure <= self.goal


# A row, its cells, and why there are none.
Judged = tuple[Row, list[Cell], str | None]


def readable(nbytes: float) -> str:
    """4096: "4K"."""
    for unit, name in ((MB, "M"), (KB, "K")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g}{name}"
    return str(nbytes)


def _compared(
    runs: Runs, names: Sequence[str], other: str, figure: Callable[[float, float], float], keep: Keep
) -> list[Cell]:
    cells = []
    for name in names:
        by_case: dict[tuple[str, int], dict[str, float]] = {}
        for r in runs[name]["results"]:
            by_case.setdefault((r["operation"], r["bytes"]), {})[r["reference"]] = r["median_us"]
        for (operation, nbytes), times in by_case.items():
            if keep(operation, nbytes) and {"custom", other} <= times.keys():
                label = f"{operation} {readable(nbytes)}, {runs[name]['ranks']} ranks"
                cells.append(Cell(label, figure(times["custom"], times[other])))
    return cells


def _times_as_fast(names: Sequence[str], other: str, keep: Keep) -> Callable[[Runs], list[Cell]]:
    return lambda runs: _compared(runs, names, other, lambda ours, theirs: theirs / ours, keep)


def _all_reduce(low: int, high: int) -> Keep:
    return lambda operation, nbytes: operation == "all_reduce" and low <= nbytes <= high


def _ddp(runs: Runs) -> list[Cell]:
    by_model: dict[str, dict[str, float]] = {}
    for r in runs["ddp"]["ddp"]:
        by_model.setdefault(r["model"], {})[r["reference"]] = r["comm"]
    # Where gloo's is lost in the noise there is nothing to compare with.
    return [
        Cell(f"{model}: {t['custom']:.2f} of {t['gloo']:.2f} ms", t["custom"] / t["gloo"])
        for model, t in by_model.items()
        if t["gloo"]
    ]


_MANY = tuple(f"{n} ranks" for n in MANY)
_EVERY = ("2 ranks, others", *_MANY)

ROWS = (
    Row(
        "all_reduce to 16K, 2 ranks",
        "gloo",
        20,
        True,
        "x",
        ("2 ranks",),
        _times_as_fast(("2 ranks",), "gloo", _all_reduce(0, 16 * KB)),
    ),
    Row(
        "all_reduce 256K to 64M, 2 ranks",
        "gloo",
        4,
        True,
        "x",
        ("2 ranks",),
        _times_as_fast(("2 ranks",), "gloo", _all_reduce(256 * KB, 64 * MB)),
    ),
    Row(
        "all_reduce, all sizes, 4 and 8 ranks",
        "gloo",
        2,
        True,
        "x",
        _MANY,
        _times_as_fast(_MANY, "gloo", _all_reduce(0, 64 * MB)),
    ),
    Row(
        "all_reduce from 64K, 2 ranks",
        "raw MPI",
        1,
        True,
        "x",
        ("mpi",),
        _times_as_fast(("mpi",), "mpi", _all_reduce(64 * KB, 64 * MB)),
    ),
    Row(
        "all_reduce 1M to 64M, 2 ranks",
        "the floor",
        2,
        False,
        "x its time",
        ("2 ranks",),
        lambda runs: _compared(runs, ("2 ranks",), "floor", lambda ours, floor: ours / floor, _all_reduce(MB, 64 * MB)),
    ),
    Row(
        "all_reduce 1K, 2 ranks",
        "noop",
        3,
        False,
        "us more",
        ("2 ranks",),
        lambda runs: _compared(runs, ("2 ranks",), "noop", lambda ours, noop: ours - noop, _all_reduce(KB, KB)),
    ),
    Row(
        "the other operations, every size, 2 to 8 ranks",
        "gloo",
        1,
        True,
        "x",
        _EVERY,
        _times_as_fast(_EVERY, "gloo", lambda operation, nbytes: operation in OTHERS),
    ),
    Row("DDP step, 6 Linear(1024), 2 ranks: communication", "gloo", 1 / 3, False, "of its time", ("ddp",), _ddp),
    Row(
        "every operation and size, 4 and 8 ranks",
        "gloo",
        2,
        True,
        "x",
        _MANY,
        _times_as_fast(_MANY, "gloo", lambda operation, nbytes: True),
    ),
)


def plan(busy: int) -> list[Part]:
    """The parts that ROWS need, all with so many busy cores."""
    burn = ("--busy", str(busy)) if busy else ()
    quick = ("--rounds", "5", "--seconds", "0.04", *burn)
    long = ("--rounds", "7", "--seconds", "0.06", *burn)
    return [
        Part("2 ranks", ("all_reduce", "-r", "2", "--against", "gloo,noop,floor", *long)),
        Part("2 ranks, others", (",".join(OTHERS), "-r", "2", "-f", "64", *quick)),
        *(
            Part(f"{n} ranks", (",".join(("all_reduce", *OTHERS, *ROOTED)), "-r", str(n), "-f", "64", *quick))
            for n in MANY
        ),
        Part("mpi", ("all_reduce", "-b", "64K", "--against", "mpi", *long), mpi_ranks=2),
        Part("ddp", ("1024x6", "-r", "2", "--rounds", "10", *burn), command=(*parts.OWN, "ddp")),
    ]


def _number(figure: float, unit: str) -> str:
    return f"{figure:.3g} {unit}" if unit != "x" else f"{figure:.3g} x"


def judge(runs: Runs, missing: dict[str, str]) -> list[Judged]:
    """[(row, cells, why not)] for each row: cells, or why there are none."""
    judged = []
    for row in ROWS:
        why = next((missing[name] for name in row.needs if name in missing), None)
        cells = [] if why else row.cells(runs)
        judged.append((row, cells, why or (None if cells else "nothing of it was measured")))
    return judged


def text(judged: list[Judged]) -> str:
    lines = [
        f"{'what':<50} {'against':<10} {'goal':>20} {'worst figure':>20} {'median':>8}  {'':<7} where the worst is"
    ]
    for row, cells, why in judged:
        goal = f"{'>=' if row.least else '<='} {_number(row.goal, row.unit)}"
        if why:
            lines.append(f"{row.what:<50} {row.against:<10} {goal:>20} {'not measured':>20}: {why}")
            continue
        worst = row.worst(cells)
        lines.append(
            f"{row.what:<50} {row.against:<10} {goal:>20} {_number(worst.figure, row.unit):>20} "
            f"{statistics.median(c.figure for c in cells):>8.3g}  {'met' if row.met(worst.figure) else 'MISSED':<7} "
            f"{worst.label}; {sum(row.met(c.figure) for c in cells)} of {len(cells)} meet it"
        )
    return "\n".join(lines)


def main(busy: int, json_file: str | None, run: Callable[[Part], tuple[Any, str | None]] = parts.run) -> int:
    """Measures all parts, with ``busy`` more processes burning a core each, prints the judgement, and
    writes it to ``json_file`` if that names one. 1 if a part failed, else 0. Not under a launcher: the parts are runs
    of their own, of minutes each."""
    about, began = environment.about(), time.monotonic()
    runs: Runs = {}
    missing: dict[str, str] = {}
    about["load"] = os.getloadavg()[0]
    print(
        f"{about['cpu']}, {len(os.sched_getaffinity(0))} cores, load {about['load']:.1f} before; torch {about['torch']}"
        + (f"; {busy} more processes burning a core each" if busy else "")
        + "\n",
        flush=True,
    )
    for part in plan(busy):
        print(part.text(), flush=True)
        result, why = run(part)
        if why:
            missing[part.name] = why
            print(f"  failed: {why}", flush=True)
        else:
            runs[part.name] = result
    judged = judge(runs, missing)
    about["load_after"] = os.getloadavg()[0]
    print(f"\n{text(judged)}\n\nload {about['load_after']:.1f} after; {time.monotonic() - began:.0f} s")
    if json_file:
        rows = [
            {
                "what": r.what,
                "against": r.against,
                "goal": r.goal,
                "least": r.least,
                "unit": r.unit,
                "why_not": why,
                "cells": {c.label: c.figure for c in cells},
                "figure": r.worst(cells).figure if cells else None,
                "met": r.met(r.worst(cells).figure) if cells else None,
            }
            for r, cells, why in judged
        ]
        with open(json_file, "w") as f:
            json.dump({**about, "busy": busy, "rows": rows, "parts": runs}, f, indent=1)
    return int(bool(missing))
