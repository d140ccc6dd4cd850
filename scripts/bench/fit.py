"""The model's parameters from measurements: files that ``bench --json`` wrote.

Each implementation is fitted by itself, ours by the hierarchical algorithm and raw MPI by the flat ones: a parameter
is what that implementation makes of the hardware. Least squares of log(predicted / measured), which is the relative
error where that is small, and weighs twice and half alike; over the logarithms of the parameters, by
Levenberg-Marquardt. A weak pull keeps parameters that the measurements do not determine near their
start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy

from .model import Job, Machine, flat, hierarchical

if TYPE_CHECKING:
    from collections.abc import Sequence


PREDICT = {"custom": hierarchical, "mpi": flat}  # reference in a bench file: algorithm that predicts it
PULL = 0.02  # a parameter e times its start costs what one point with an error of 2 % costs
FITTED = tuple(f.name for f in fields(Machine) if f.name != "shared")


@dataclass(frozen=True)
class Point:
    """One measured time."""

    reference: str
    job: Job
    bytes: int
    seconds: float


def read(paths: Iterable[str], figure: str = "median_us") -> list[Point]:
    """The all_reduce times of bench files, of the references that have a model; ``figure`` "min_us" leaves out what
    other work on a busy machine added."""
    points = []
    for path in paths:
        with open(path) as f:
            run = json.load(f)
        job = Job(tuple(h["ranks"] for h in run["hosts"]))
        points += [
            Point(r["reference"], job, r["bytes"], r[figure] / 1e6)
            for r in run["results"]
            if r["operation"] == "all_reduce" and r["reference"] in PREDICT
        ]
    return points


def errors(points: Sequence[Point], machine: Machine) -> Any:
    """(predicted - measured) / measured of each point."""
    return numpy.array([PREDICT[p.reference](p.job, machine, p.bytes) / p.seconds - 1 for p in points])


def fit(
    points: Sequence[Point], start: Machine | None = None, names: Sequence[str] = FITTED, iterations: int = 60
) -> Machine:
    """The Machine that predicts ``points`` best, changing only the parameters ``names`` of ``start``."""
    start = start or Machine()

    def machine(x: Any) -> Machine:
        found: dict[str, Any] = {n: float(v) for n, v in zip(names, numpy.exp(x), strict=True)}
        return replace(start, **found)

    middle = numpy.log([getattr(start, n) for n in names])

    def misses(x: Any) -> Any:
        return numpy.concatenate([numpy.log1p(errors(points, machine(x))), PULL * (x - middle)])

    def try_from(x: Any) -> tuple[Any, Any]:
        damping, e = 1e-2, misses(x)
        for _ in range(iterations):
            step = 1e-4
            slopes = numpy.stack(
                [(misses(x + step * d) - misses(x - step * d)) / (2 * step) for d in numpy.eye(len(x))], axis=1
            )
            while damping < 1e8:
                normal = slopes.T @ slopes
                move = numpy.linalg.solve(normal + damping * numpy.diag(numpy.diag(normal)), -slopes.T @ e)
                there = x + numpy.clip(move, -1.5, 1.5)
                e_there = misses(there)
                if e_there @ e_there < e @ e:
                    break
                damping *= 4
            else:
                break
            gained = 1 - (e_there @ e_there) / (e @ e) if e @ e else 0
            x, e, damping = there, e_there, damping / 10
            if gained < 1e-7:
                break
        return e @ e, x

    # The model has kinks, where another resource or algorithm becomes the one that counts: more than one start.
    shifts = [numpy.zeros(len(names))] + [
        sign * numpy.log(4) * numpy.array([n == m for n in names])
        for m in ("beta", "copy", "memory")
        if m in names
        for sign in (1, -1)
    ]
    best = min((try_from(middle + s) for s in shifts), key=lambda result: result[0])
    return machine(best[1])
