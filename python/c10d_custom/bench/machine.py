"""``python -m c10d_custom bench --machine``: a large host in one command and a limited time. How its cores lie, then
all_reduce, all_gather, all_to_all and barrier at 2 ranks to as many as cores, by doubling, beside gloo and what else is
installed; and the published figures of other large hosts that this one is to be held against."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..native import CpuPlace, lib
from . import environment
from .machine_part import BARRIER, Part, as_text
from .picture import draw_machine, readable

LIMIT = 600  # s
_OPERATIONS = "all_reduce", "all_gather", "all_to_all"
_KB, _MB = 1 << 10, 1 << 20
_FIRST = 4, 10 * _KB, 64 * _KB, _MB, 32 * _MB  # these say most, and are what is published
_REST = 64, _KB, 4 * _KB, 16 * _KB, 256 * _KB, 4 * _MB, 16 * _MB, 64 * _MB
_ON_THE_PAGE = 4, _KB, 10 * _KB, 64 * _KB, _MB, 32 * _MB, 64 * _MB
_ENDING = 0.1  # of a part's time: for ranks to end in
_MPI_TRIAL, _GRACE = 30, 2  # s
_AROUND = 6  # s: what comes before and after the parts

# (operation, bytes, microseconds, whose and where). All are on other machines.
PUBLISHED = (
    ("all_reduce", 32 * _MB, 650.0, "DeepSpeed's op in shared memory, 2 sockets of 56 cores"),
    ("all_reduce", 64 * _KB, 28.0, "DeepSpeed's op in shared memory, 2 sockets of 56 cores"),
    ("all_reduce", 10 * _KB, 12.0, "DeepSpeed's op in shared memory, 8 ranks"),
)
# Without bound ranks, as all others here; by variables, which each launcher takes if they are its own.
_NOT_BOUND = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "I_MPI_PIN": "0",
}


@dataclass(frozen=True)
class Machine:
    limit: float  # s, in all
    most: int | None  # ranks; None: as many as cores
    json: str | None
    plot: str | None


def topology() -> list[dict[str, int]]:
    """Of each core that this process may run on: its number, and those of its last-level cache, node and socket, from
    0; and that cache's bytes, 0 if not known."""
    count = lib.c10d_topology(None, None, 0, None, 0)
    places = (CpuPlace * count)()
    lib.c10d_topology(None, None, 0, places, count)
    return [
        {name: getattr(place, name) for name in ("cpu", "cache", "node", "socket", "cache_bytes")} for place in places
    ]


def topology_text(cpus: Sequence[dict[str, int]]) -> str:
    def count(what: str) -> int:
        return len({cpu[what] for cpu in cpus})

    def some(number: int, name: str) -> str:
        return f"{number} {name}{'s' * (number != 1)}"

    sizes: dict[tuple[int, int], int] = {}
    for cache in sorted({cpu["cache"] for cpu in cpus}):
        of = [cpu for cpu in cpus if cpu["cache"] == cache]
        key = len(of), of[0]["cache_bytes"]
        sizes[key] = sizes.get(key, 0) + 1
    caches = ", ".join(
        f"{number} x {readable(nbytes) if nbytes else 'of unknown size'} for {some(cores, 'core')}"
        for (cores, nbytes), number in sizes.items()
    )
    return (
        f"{some(len(cpus), 'core')} for this process, {some(count('socket'), 'socket')}, "
        f"{some(count('node'), 'NUMA node')}; last-level caches: {caches}"
    )


def rank_counts(cores: int) -> list[int]:
    """2, 4, 8, ... and the number of cores; 2 on a single one."""
    counts = [2]
    while counts[-1] * 2 <= cores:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] >= cores else [*counts, cores]


def cases() -> tuple[tuple[str, int], ...]:
    """(operation, bytes) in the order in which they are timed: what says most comes first."""
    return (
        (BARRIER, 0),
        *((operation, nbytes) for operation in _OPERATIONS for nbytes in _FIRST),
        *((operation, nbytes) for operation in _OPERATIONS for nbytes in _REST),
    )


def _mpiexec(seconds: float) -> tuple[str | None, str]:
    """(what starts ranks of the MPI that mpi4py finds, why there is none)"""
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        return None, "it needs mpi4py and an MPI's mpiexec (pip install mpi4py mpich)"
    program = "from mpi4py import MPI; print('ranks', MPI.COMM_WORLD.size)"
    status, out = _run([found, "-n", "2", sys.executable, "-c", program], seconds)
    if status == 0 and out.count("ranks 2") == 2:
        return found, ""
    return None, f"{found} starts no ranks of mpi4py's MPI: {_last_line(out) if status is not None else 'time is over'}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word"])[-1]


def _run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """(exit status, what it printed); None as the status where it was ended for taking so long."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, text=True, env={**_NOT_BOUND, **os.environ}, start_new_session=True
        )
        try:
            status = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
            process.terminate()  # a launcher ends its ranks, and removes their files
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        finally:
            # Its ranks, too, also where it has ended without them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return status, out.read()


def _timed(mpiexec: str | None, ranks: int, seconds: float, against: tuple[str, ...], file: str) -> str | None:
    """One part, within so many seconds. Why it is not whole, or None."""
    part = Part(ranks, cases(), against, time.time() + seconds * (1 - _ENDING), file)
    program = f"import sys; from {__package__}.machine_part import main; sys.exit(main(sys.argv[1]))"
    command = [sys.executable, "-c", program, as_text(part)]
    status, out = _run([mpiexec, "-n", str(ranks), *command] if mpiexec else command, seconds)
    if status is None:
        return "ended for want of time"
    return None if status == 0 else _last_line(out)


def _read(file: str) -> list[dict[str, Any]]:
    said = []
    with open(file) as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that its writer was killed in
                said.append(json.loads(line))
    return said


def main(what: Machine) -> int:
    """The command's exit status: 1 where nothing could be timed."""
    end = time.monotonic() + max(what.limit - _AROUND, what.limit / 2)
    cpus = topology()
    about = {**environment.about(), "limit": what.limit, "topology": cpus}
    print(f"{about['cpu']}: {topology_text(cpus)}\n{about['kernel']}, torch {about['torch']}", flush=True)
    counts = [n for n in rank_counts(len(cpus)) if what.most is None or n <= max(2, what.most)]
    mpiexec, no_mpi = _mpiexec(min(_MPI_TRIAL, what.limit / 4))
    against = ("gloo", *(("mpi",) * bool(mpiexec)), *(("deepspeed",) * bool(importlib.util.find_spec("deepspeed"))))
    notes: list[str] = []
    if not mpiexec:
        notes.append(f"raw MPI is not timed: {no_mpi}")
    if "deepspeed" not in against:
        notes.append("DeepSpeed's op is not timed: it needs DeepSpeed, ninja and a compiler")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "results")
        Path(file).touch()
        for i, ranks in enumerate(counts):
            seconds = (end - time.monotonic()) / (len(counts) - i)
            print(f"{ranks} ranks: {seconds:.0f} s", flush=True)
            before, until = os.path.getsize(file), time.monotonic() + seconds
            why = _timed(mpiexec, ranks, seconds, against, file)
            if why and mpiexec and os.path.getsize(file) == before:
                notes.append(f"{ranks} ranks under {mpiexec}: {why}; started without it")
                why = _timed(None, ranks, until - time.monotonic(), against, file)
            if why:
                notes.append(f"{ranks} ranks: {why}")
        said = _read(file)
    results = [each for each in said if "median_us" in each]
    for each in said:
        for name, reason in each.get("missing", {}).items():
            notes.append(f"{each['ranks']} ranks: {name} is not timed: {reason}")
    notes += _not_timed(counts, results)
    print(page(counts, results, list(dict.fromkeys(notes))))
    about["mpi"] = next((each["mpi"] for each in said if each.get("mpi")), None)
    if what.json:
        with open(what.json, "w") as f:
            json.dump({**about, "notes": notes, "published": PUBLISHED, "results": results}, f, indent=1)
    timed = [operation for operation in _OPERATIONS if any(r["operation"] == operation for r in results)]
    if what.plot and results:
        draw_machine(what.plot, f"{about['cpu']}, {len(cpus)} cores", results, timed)
        print(what.plot)
    return 0 if results else 1


def _not_timed(counts: Sequence[int], results: Sequence[dict[str, Any]]) -> list[str]:
    """What there was no time for, of ours, and of others that were timed at other sizes."""
    done = {(r["ranks"], r["operation"], r["bytes"], r["reference"]) for r in results}
    notes = []
    for ranks in counts:
        names = ["custom", *(n for n in dict.fromkeys(r["reference"] for r in results) if n != "custom")]
        for operation in (BARRIER, *_OPERATIONS):
            sizes = sorted(nbytes for each, nbytes in cases() if each == operation)
            for name in names:
                lacking = [nbytes for nbytes in sizes if (ranks, operation, nbytes, name) not in done]
                if lacking and (name == "custom" or len(lacking) < len(sizes)):
                    which = "" if operation == BARRIER else " of " + ", ".join(map(readable, lacking))
                    notes.append(f"{ranks} ranks: no time for {operation}{which}, {name}")
    return notes


def page(counts: Sequence[int], results: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    """Our times in microseconds, and how many times as fast they are as each other's."""
    found = {(r["operation"], r["bytes"], r["ranks"], r["reference"]): r["median_us"] for r in results}
    names = list(dict.fromkeys(r["reference"] for r in results if r["reference"] != "custom"))
    lines = []

    def row(label: str, cells: Sequence[str]) -> str:
        return f"{label:>24}" + "".join(f"{cell:>9}" for cell in cells)

    def cells(operation: str, nbytes: int, name: str | None) -> list[str]:
        row = []
        for ranks in counts:
            ours = found.get((operation, nbytes, ranks, "custom"))
            other = ours if name is None else found.get((operation, nbytes, ranks, name))
            if ours is None or other is None:
                row.append("-")
            else:
                row.append(f"{ours:.1f}" if name is None else f"{other / ours:.2f}")
        return row

    for operation in (BARRIER, *_OPERATIONS):
        lines += ["", row(operation, [f"{n} ranks" for n in counts])]
        for name in (None, *names):
            for nbytes in _ON_THE_PAGE if operation != BARRIER else (0,):
                size = readable(nbytes) + ", " if nbytes else ""
                each = cells(operation, nbytes, name)
                if name is None or any(cell != "-" for cell in each):
                    lines.append(row(f"{size}{'us' if name is None else 'x ' + name}", each))
    lines += ["", "to hold it against, published of other machines (all_reduce):"]
    for operation, nbytes, microseconds, whose in PUBLISHED:
        here = [
            f"{ranks} ranks {us:.0f} us"
            for ranks in counts
            if (us := found.get((operation, nbytes, ranks, "custom"))) is not None
        ]
        lines.append(f"  {readable(nbytes)}: {microseconds:g} us ({whose}); here: {', '.join(here) or 'not timed'}")
    return "\n".join([*lines, "", *notes])
