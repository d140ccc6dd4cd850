"""The cost model against measurements at several numbers of ranks.

    time = call + sync (1 + per_block (blocks - 1) syncs) + seconds of the bytes moved

Measured, in the same run: ``call`` (noop), ``sync`` (the smallest collectives, or messages, less noop) and the seconds
of a byte (the memory floor of the same size and ranks, which moves 2 S bytes on each rank). Ranks that outnumber the
cores share them: the bytes take what all ranks' bytes take on the cores there are, or the busiest rank's on one. Fitted:
what a ring's byte costs beside one of private memory, and what a block's synchronisation costs beside a call's.
"""
import json
import math
import os
import statistics
from dataclasses import dataclass

from . import environment, parts
from .cost import cost
from .parts import Part

RANKS = (2, 4, 8, 16)
SIZES = (16, 512, 16 << 10, 512 << 10, 16 << 20)
# A larger host, by assumption: bytes per second that all its cores together read and write, and what it takes to see
# a cache line that a peer has written. A core copies as fast as here.
LARGE, LARGE_MEMORY, LINE = 64, 250e9, 100e-9
FITTED_ON = (2, 4)  # the other numbers of ranks are predicted
_RING = [0.05 * k for k in range(1, 31)]
_PER_BLOCK = [0.0, *(0.005 * 1.35 ** k for k in range(20))]


@dataclass(frozen=True)
class Point:
    operation: str
    ranks: int
    nbytes: int
    cores: int
    seconds: float  # measured
    call: float
    sync: float
    floor: float

    def predicted(self, ring, per_block):
        c, n = cost(self.operation, self.nbytes, self.ranks), self.ranks

        def weight(moved):
            return (moved.private + ring * moved.ring) / (2 * self.nbytes)
        together = weight(c.total(n)) / n * self.floor
        alone = weight(c.busiest) * self.floor * min(self.cores, n) / n
        blocks = max(c.blocks - 1, 0) * c.syncs
        return self.call + self.sync * (1 + per_block * blocks) + max(together, alone)


def points(run):
    """Of one part's JSON. One time of a sync for all collectives, and one of the floor for each size, are the medians of
    what was measured beside each operation: steadier than any one of them. Messages have a sync of their own."""
    cores, n = run["hosts"][0]["cores"], run["ranks"]
    times = {}
    for r in run["results"]:
        times.setdefault((r["operation"], r["bytes"]), {})[r["reference"]] = r["median_us"] / 1e6

    def nearest(nbytes):
        return min(SIZES, key=lambda size: abs(math.log(size / nbytes)))

    def sync(messages):
        return max(1e-7, statistics.median(t["custom"] - t["noop"] for (operation, nbytes), t in times.items()
                                           if (operation == "send_recv") == messages and nearest(nbytes) in SIZES[:2]))

    def floor(size):
        return statistics.median(t["floor"] for (_, nbytes), t in times.items() if nearest(nbytes) == size)

    floors = {size: floor(size) for size in {nearest(nbytes) for _, nbytes in times}}
    syncs = {messages: sync(messages) for messages in (False, True)}
    return [Point(operation, n, nbytes, cores, t["custom"], t["noop"], syncs[operation == "send_recv"],
                  floors[nearest(nbytes)]) for (operation, nbytes), t in times.items()]


def fit(known):
    """(ring, per_block) with the least squares of log(predicted / measured)."""
    def miss(parameters):
        return sum(math.log(p.predicted(*parameters) / p.seconds) ** 2 for p in known)
    return min(((r, b) for r in _RING for b in _PER_BLOCK), key=miss)


def plan(busy):
    burn = ("--busy", str(busy)) if busy else ()
    sizes = ("-b", str(SIZES[0]), "-e", str(SIZES[-1]), "-f", "32")
    return [Part(f"{n} ranks", ("all", "-r", str(n), *sizes, "--against", "noop,floor", "--rounds", "5", "--seconds", "0.03",
                                *burn)) for n in RANKS]


def large_host(measured):
    """[Point] of as many ranks as cores, nothing measured: what the model says of it."""
    alone = [p for p in measured if p.ranks <= p.cores and p.nbytes == max(SIZES)]
    core = max(p.nbytes / p.floor for p in alone)
    call = statistics.median(p.call for p in measured if p.ranks <= p.cores)
    sync = 2 * (LARGE - 1) * LINE  # each peer's signal and fingerprint, one after the other
    return [Point(o, LARGE, nbytes, LARGE, 0.0, call, sync, max(nbytes / core, 2 * LARGE * nbytes / LARGE_MEMORY))
            for o in dict.fromkeys(p.operation for p in measured) for nbytes in SIZES]


def errors(measured, parameters):
    return sorted(abs(p.predicted(*parameters) / p.seconds - 1) for p in measured)


def text(measured, parameters):
    head = f"{'operation':>15} {'ranks':>5} {'size':>10} {'blocks':>6} {'measured us':>12} {'predicted us':>12}"
    lines = [f"{head} {'error':>7}"]
    for p in measured:
        expected = p.predicted(*parameters)
        lines.append(f"{p.operation:>15} {p.ranks:>5} {p.nbytes:>10} {cost(p.operation, p.nbytes, p.ranks).blocks:>6} "
                     f"{p.seconds * 1e6:>12.1f} {expected * 1e6:>12.1f} {expected / p.seconds - 1:>+7.0%}")
    lines.append(f"\na ring's byte costs {parameters[0]:.2f} of one of private memory, a block's synchronisation "
                 f"{parameters[1]:.3f} of a call's (fitted on {' and '.join(map(str, FITTED_ON))} ranks)")
    for n in sorted({p.ranks for p in measured}):
        off = errors([p for p in measured if p.ranks == n], parameters)
        lines.append(f"{n:>3} ranks: median error {statistics.median(off):.0%}, largest {off[-1]:.0%}, of {len(off)} times"
                     + ("" if n in FITTED_ON else ", predicted"))
    return "\n".join(lines)


def text_of_large_host(measured, parameters):
    expected = {(p.operation, p.nbytes): p.predicted(*parameters) * 1e6 for p in large_host(measured)}
    what = f"predicted us, {LARGE} ranks on {LARGE} cores that together move {LARGE_MEMORY / 1e9:.0f} GB/s"
    lines = [f"{what}, {LINE * 1e9:.0f} ns for a peer's cache line",
             f"{'operation':>15}" + "".join(f" {nbytes:>10}" for nbytes in SIZES)]
    for operation in dict.fromkeys(o for o, _ in expected):
        lines.append(f"{operation:>15}" + "".join(f" {expected[operation, nbytes]:>10.1f}" for nbytes in SIZES))
    return "\n".join(lines)


def main(busy, json_file, run=parts.run):
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
    print(f"\n{text(measured, parameters)}\n\n"
          f"{text_of_large_host(measured, parameters)}\n\nload {os.getloadavg()[0]:.1f} after")
    if json_file:
        with open(json_file, "w") as f:
            json.dump({**about, "busy": busy, "ring": parameters[0], "per_block": parameters[1], "parts": runs}, f, indent=1)
    return 0
