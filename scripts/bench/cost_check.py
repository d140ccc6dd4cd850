"""The cost model against measurements at several numbers of ranks.

    time = start + p sync (blocks - 1) syncs + private bytes x what one costs
           + ring bytes x r x what one costs in a cache

Measured, in the same run: ``start``, the operation's smallest message; ``sync``, the smallest collectives less noop;
what a byte costs, from the memory floor at all sizes: that of a private byte where the floor's buffers take as much
memory as the operation's, that of a ring's where it is least. Ranks that outnumber the cores share them: the bytes take
what all ranks' bytes take on the cores there are, or the busiest rank's on one, whichever is more. Fitted: r, and p,
the part of a block's synchronisation that work does not hide."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from c10d_custom.bench import environment

from . import parts
from .cost import cost
from .parts import Part

if TYPE_CHECKING:
    from .cost import Moved


RANKS = (2, 4, 8, 16)
SIZES = (16, 512, 16 << 10, 512 << 10, 16 << 20)
# A larger host, by assumption: bytes per second that all its cores together read and write, and what it takes to see
# a cache line that a peer has written. A core copies as fast as here.
LARGE, LARGE_MEMORY, LINE = 64, 250e9, 100e-9
FITTED_ON = (2, 4)  # the other numbers of ranks are predicted
_RING = [0.1 * 1.2**k for k in range(28)]
_PER_BLOCK = [0.0, *(0.005 * 1.35**k for k in range(20))]


@dataclass(frozen=True)
class Point:
    operation: str
    ranks: int
    nbytes: int
    cores: int
    seconds: float  # measured
    start: float
    sync: float
    private: float  # seconds of one byte, on each of all ranks at once
    ring: float

    def predicted(self, ring: float, per_block: float) -> float:
        """Seconds, with the fitted r and p."""
        c, n = cost(self.operation, self.nbytes, self.ranks), self.ranks

        def bytes_of(moved: Moved) -> float:
            return moved.private * self.private + ring * moved.ring * self.ring

        together = bytes_of(c.total(n)) / n
        alone = bytes_of(c.busiest) * min(self.cores, n) / n
        blocks = max(c.blocks - 1, 0) * c.syncs
        return self.start + self.sync * per_block * blocks + max(together, alone)


def between(curve: Iterable[tuple[float, float]], x: float) -> float:
    """y at ``x`` of [(x, y), ...], on straight lines between logarithms; beyond the ends, the ends'."""
    curve = sorted(curve)
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x <= x1:
            part = max(0.0, math.log(x / x0) / math.log(x1 / x0))
            return y0 ** (1 - part) * y1**part
    return curve[-1][1]


def points(run: dict[str, Any]) -> list[Point]:
    """Of one part's JSON: all but the smallest size of each operation, which is its start."""
    cores, n = run["hosts"][0]["cores"], run["ranks"]
    times: dict[str, dict[int, dict[str, float]]] = {}
    floors: dict[int, list[float]] = {}
    for r in run["results"]:
        seconds = r["median_us"] / 1e6
        times.setdefault(r["operation"], {}).setdefault(r["bytes"], {})[r["reference"]] = seconds
        if r["reference"] == "floor":
            nearest = min(SIZES, key=lambda size: abs(math.log(size / r["bytes"])))
            floors.setdefault(nearest, []).append(seconds)
    # Steadier than any one: the median of what was measured beside each operation.
    byte = {size: statistics.median(seconds) / (2 * size) for size, seconds in floors.items()}
    curve = [(2 * n * size, seconds) for size, seconds in byte.items()]
    starts = {operation: by_size[min(by_size)] for operation, by_size in times.items()}
    sync = max(
        1e-7, statistics.median(t["custom"] - t["noop"] for operation, t in starts.items() if operation != "send_recv")
    )
    return [
        Point(
            operation,
            n,
            nbytes,
            cores,
            by_size[nbytes]["custom"],
            starts[operation]["custom"],
            starts[operation]["custom"] if operation == "send_recv" else sync,
            between(curve, cost(operation, nbytes, n).total(n).private),
            min(byte.values()),
        )
        for operation, by_size in times.items()
        for nbytes in sorted(by_size)[1:]
    ]


def fit(known: Sequence[Point]) -> tuple[float, float]:
    """(ring, per_block) with the least squares of log(predicted / measured)."""

    def miss(parameters: tuple[float, float]) -> float:
        return sum(math.log(p.predicted(*parameters) / p.seconds) ** 2 for p in known)

    return min(((r, b) for r in _RING for b in _PER_BLOCK), key=miss)


def plan(busy: int) -> list[Part]:
    """A run for each of RANKS."""
    burn = ("--busy", str(busy)) if busy else ()
    sizes = ("-b", str(SIZES[0]), "-e", str(SIZES[-1]), "-f", "32")
    return [
        Part(
            f"{n} ranks",
            ("all", "-r", str(n), *sizes, "--against", "noop,floor", "--rounds", "5", "--seconds", "0.03", *burn),
        )
        for n in RANKS
    ]


def large_host(measured: Sequence[Point]) -> list[Point]:
    """[Point] of as many ranks as cores, nothing measured: what the model says of it."""
    alone = [p for p in measured if p.ranks <= p.cores]
    core = statistics.median(p.ring for p in alone)
    call = statistics.median(p.start - p.sync for p in alone if p.operation == "all_reduce")
    sync = 2 * (LARGE - 1) * LINE  # each peer's signal and fingerprint, one after the other
    memory = max(core, LARGE / LARGE_MEMORY)
    return [
        Point(o, LARGE, nbytes, LARGE, 0.0, max(call, 0) + sync, sync, memory, core)
        for o in dict.fromkeys(p.operation for p in measured)
        for nbytes in SIZES
    ]


def errors(measured: Sequence[Point], parameters: tuple[float, float]) -> list[float]:
    """|predicted / measured - 1| of each, sorted."""
    return sorted(abs(p.predicted(*parameters) / p.seconds - 1) for p in measured)


def text(measured: Sequence[Point], parameters: tuple[float, float]) -> str:
    head = f"{'operation':>15} {'ranks':>5} {'size':>10} {'blocks':>6} {'measured us':>12} {'predicted us':>12}"
    lines = [f"{head} {'error':>7}"]
    for p in measured:
        expected = p.predicted(*parameters)
        lines.append(
            f"{p.operation:>15} {p.ranks:>5} {p.nbytes:>10} {cost(p.operation, p.nbytes, p.ranks).blocks:>6} "
            f"{p.seconds * 1e6:>12.1f} {expected * 1e6:>12.1f} {expected / p.seconds - 1:>+7.0%}"
        )
    lines.append(
        f"\nr = {parameters[0]:.2f}, p = {parameters[1]:.3f}, fitted on {' and '.join(map(str, FITTED_ON))} ranks"
    )
    for n in sorted({p.ranks for p in measured}):
        off = errors([p for p in measured if p.ranks == n], parameters)
        lines.append(
            f"{n:>3} ranks: median error {statistics.median(off):.0%}, largest {off[-1]:.0%}, of {len(off)} times"
            + ("" if n in FITTED_ON else ", predicted")
        )
    return "\n".join(lines)


def text_of_large_host(measured: Sequence[Point], parameters: tuple[float, float]) -> str:
    expected = {(p.operation, p.nbytes): p.predicted(*parameters) * 1e6 for p in large_host(measured)}
    what = f"predicted us, {LARGE} ranks on {LARGE} cores that together move {LARGE_MEMORY / 1e9:.0f} GB/s"
    lines = [
        f"{what}, {LINE * 1e9:.0f} ns for a peer's cache line",
        f"{'operation':>15}" + "".join(f" {nbytes:>10}" for nbytes in SIZES),
    ]
    for operation in dict.fromkeys(o for o, _ in expected):
        lines.append(f"{operation:>15}" + "".join(f" {expected[operation, nbytes]:>10.1f}" for nbytes in SIZES))
    return "\n".join(lines)


def main(busy: int, json_file: str | None, run: Callable[[Part], tuple[Any, str | None]] = parts.run) -> int:
    """Measures at each of RANKS, with ``busy`` more processes burning a core each, fits, prints the
    errors, and writes r, p and the figures to ``json_file`` if that names one. 1 if a run failed, else 0."""
    about = {**environment.about(), "load": os.getloadavg()[0]}
    print(f"{about['cpu']}, {len(os.sched_getaffinity(0))} cores, load {about['load']:.1f} before\n", flush=True)
    runs = {}
    for part in plan(busy):
        print(part.text(), flush=True)
        runs[part.name], why = run(part)
        if why:
            print(f"  failed: {why}")
            return 1
    measured = [p for r in runs.values() for p in points(r)]
    parameters = fit([p for p in measured if p.ranks in FITTED_ON])
    print(
        f"\n{text(measured, parameters)}\n\n"
        f"{text_of_large_host(measured, parameters)}\n\nload {os.getloadavg()[0]:.1f} after"
    )
    if json_file:
        with open(json_file, "w") as f:
            json.dump({**about, "busy": busy, "r": parameters[0], "p": parameters[1], "parts": runs}, f, indent=1)
    return 0
