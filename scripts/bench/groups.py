"""What groups cost to make on one host: init_process_group and a first all_reduce, new_group and its first, for several
numbers of ranks and each backend."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c10d_custom import native
from c10d_custom.bench import environment
from c10d_custom.bench.ranks import burning

from .forked import REGROUPS, SECONDS, WHAT

FORKED = str(Path(__file__).with_name("forked.py"))


@dataclass(frozen=True)
class Groups:
    sizes: tuple[int, ...]  # numbers of ranks
    against: tuple[str, ...]
    rounds: int
    busy: int
    json: str | None


def refused(against: Sequence[str]) -> str | None:
    """Which of these makes no groups."""
    return next((name for name in against if name in ("mpi", "floor")), None)


def _room_for(size: int) -> bool:
    """Whether so many processes as large as this one, which has imported torch too, fit into half of what is free."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return size * pages * mmap.PAGESIZE < native.memory_left()[0] // 2


def _forked(size: int, names: Sequence[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    command = [sys.executable, "-P", FORKED, json.dumps([size, names, rounds, _room_for(size)])]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60 + SECONDS * rounds * len(names))
    if out.returncode:
        raise SystemExit(1)  # it has said why
    found: dict[str, dict[str, list[float]]] = json.loads(out.stdout)
    return found


def _place(busy: int) -> str:
    more = f", {busy} more process{'es' if busy > 1 else ''} burning a core each" if busy else ""
    return f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before{more}"


def _row(size: int, name: str, of: dict[str, float], base: dict[str, float], to: str) -> str:
    def ratio(what: str) -> str:
        return "-" if name == to else f"{of[what] / base[what]:.2f}"

    return (
        f"{size:>6} {name:>8} {of['init']:>9.2f} {of['call']:>8.2f} {ratio('call'):>8} | {of['group']:>9.2f} "
        f"{ratio('group'):>8} {of['group call']:>9.2f} {ratio('group call'):>8}"
    )


def main(asked: Groups) -> int:
    """The command's exit status."""
    names, to = ("custom", *asked.against), asked.against[0]
    about: dict[str, Any] = {**environment.about(), "busy": asked.busy, "load_before": os.getloadavg()[0]}
    over = f"/ {to}"
    print(
        f"torch {about['torch']}, {_place(asked.busy)}\n\nmilliseconds until the slowest rank has it, medians of "
        f"{asked.rounds} rounds\n\n"
        f"{'':>15} {'init_process_group':>27} | {'new_group':>36}\n"
        f"{'ranks':>6} {'backend':>8} {'made':>9} {'called':>8} {over:>8} | {'made':>9} {over:>8} {'called':>9} "
        f"{over:>8}"
    )
    results = []
    with burning(asked.busy):
        for size in asked.sizes:
            found = _forked(size, names, asked.rounds)
            medians = {n: {what: 1e3 * statistics.median(found[n][what]) for what in WHAT} for n in names}
            for name in names:
                print(_row(size, name, medians[name], medians[to], to), flush=True)
                each = {what.replace(" ", "_"): [round(1e3 * s, 3) for s in found[name][what]] for what in WHAT}
                results.append({"ranks": size, "reference": name, "ms": each})
            if all(found["custom"][what] for what in REGROUPS):
                again, beside = (1e3 * statistics.median(found["custom"][what]) for what in REGROUPS)
                print(
                    f"{size:>6}   custom, made again (reconfigure): {again:.2f}, {again / beside:.2f} of a new_group's "
                    f"{beside:.2f} beside it"
                )
    about["load_after"] = os.getloadavg()[0]
    print(f"\nload {about['load_after']:.1f} after")
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({**about, "results": results}, file, indent=1)
    return 0
