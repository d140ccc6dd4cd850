"""One run over operations and sizes, on every rank: the statistics of each reference's times, and
what it makes of each, checked where asked."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import environment, noop, picture, ranks, raw_mpi, references, table
from .case import REDUCING, ROOTED, Case, Reference, Unavailable, name_of
from .operations import KNOWN
from .timing import Plan, Timed, times

if TYPE_CHECKING:
    from .operations import Buffers


@dataclass(frozen=True)
class Sweep:
    operations: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    dtype: torch.dtype
    redop: str
    root: int
    asynchronous: bool
    against: tuple[str, ...]
    ratio_to: str | None  # None: the first of ``against`` that can be had here
    check: bool
    busy: int
    plan: Plan
    json: str | None
    plot: str | None

    def case(self, operation: str, nbytes: int) -> Case:
        """Of about ``nbytes`` in the operation's largest buffer, on this rank of the default group."""
        size = dist.get_world_size()
        count = KNOWN[operation].split(max(1, nbytes // self.dtype.itemsize), size)
        return Case(
            operation,
            count,
            self.dtype,
            self.redop if operation in REDUCING else None,
            self.root if operation in ROOTED else -1,
            self.asynchronous,
            dist.get_rank(),
            size,
        )


def _refusal(reference: Reference, case: Case) -> str | None:
    """Why a reference cannot do this case, alike on all ranks; None if it can. It is tried."""
    why = None
    try:
        call = reference.bind(case, KNOWN[case.operation].make(case))
    except Unavailable as error:
        why = str(error)
    if why is None:
        try:
            call()
        except (RuntimeError, ValueError, KeyError, NotImplementedError) as error:
            why = str(error).splitlines()[0]
    return ranks.first_said(why)


def _wrong(call: Callable[[], object], buffers: Buffers, reference: Reference) -> int | None:
    """Wrong elements over all ranks after one call. The sum goes through the Store: none of those that are being
    checked."""
    if not reference.checked:
        return None
    buffers.fill()
    reference.barrier()  # in a window others write before this rank calls anything
    call()
    mine = buffers.wrong()
    buffers.clear()
    return ranks.sum_through_store(mine)


def _result(case: Case, reference: str, seconds: Sequence[float], wrong: int | None, ranks_: int) -> dict[str, Any]:
    ordered, p50 = sorted(seconds), statistics.median(seconds)
    # A group that does nothing moves nothing, and a copy uses no bus.
    algbw = None if reference == noop.NAME else case.nbytes / p50 / 1e9
    busbw = None if algbw is None or reference == "floor" else algbw * KNOWN[case.operation].bus_factor(ranks_)
    return {
        "operation": case.operation,
        "bytes": case.nbytes,
        "count": case.count,
        "type": name_of(case.dtype),
        "redop": case.redop,
        "root": case.root,
        "async": case.asynchronous,
        "reference": reference,
        "ranks": ranks_,
        "calls": len(ordered),
        "min_us": ordered[0] * 1e6,
        "median_us": p50 * 1e6,
        "p99_us": ordered[int(len(ordered) * 0.99)] * 1e6,
        "mean_us": statistics.fmean(ordered) * 1e6,
        "algbw": algbw,
        "busbw": busbw,
        "wrong": wrong,
    }


def _of_size(sweep: Sweep, case: Case, usable: dict[str, Reference], say: Callable[..., None]) -> list[dict[str, Any]]:
    """The results on one case of all references that know such a size."""
    operation = KNOWN[case.operation]
    buffers = operation.make(case)
    part = operation.takes_part(case.rank, case.size)
    own = {name: references.placed(r, buffers) for name, r in usable.items()}
    timed = {}
    for name, reference in usable.items():
        try:
            call = reference.bind(case, own[name])
        except Unavailable as error:  # alike on all ranks
            say(f"{name} is not timed at {case.nbytes} bytes: {error}")
            continue
        timed[name] = Timed(call, reference.barrier, reference.repeats(case), part)
    wrong = {name: _wrong(t.call, own[name], usable[name]) if sweep.check else None for name, t in timed.items()}
    return [_result(case, n, seconds, wrong[n], case.size) for n, seconds in times(timed, sweep.plan).items()]


def _of_operation(
    sweep: Sweep, operation: str, timed: dict[str, Reference], ratio_to: str, say: Callable[..., None]
) -> list[dict[str, Any]]:
    smallest = sweep.case(operation, min(sweep.sizes))
    refusals = {name: _refusal(r, smallest) for name, r in timed.items()}
    usable = {name: r for name, r in timed.items() if refusals[name] is None}
    say(
        f"\n{operation}{', asynchronous' if sweep.asynchronous else ''}, {smallest.size} ranks; "
        f"{table.HOW[sweep.plan.average]}"
    )
    for name, why in refusals.items():
        if why is not None:
            say(f"{name} is not timed: {why}")
    if not usable:
        return []
    say(table.head(ratio_to))
    results, done = [], set()
    for nbytes in sweep.sizes:
        case = sweep.case(operation, nbytes)
        if case.count in done:  # small sizes become one where they are cut into equal parts
            continue
        done.add(case.count)
        results += (rows := _of_size(sweep, case, usable, say))
        say(table.rows(rows, ratio_to), flush=True)
    return results


def run(sweep: Sweep) -> bool:
    """One rank's whole run; collective over the default group. True where a check found wrong elements."""
    hosts, rank = ranks.hosts(), dist.get_rank()
    timed, missing = references.make(sweep.against, len(hosts))
    ratio_to = sweep.ratio_to or next((name for name in sweep.against if name in timed), "custom")
    mpi = raw_mpi.version()
    about = {**environment.about(), "mpi": mpi, "ranks": dist.get_world_size(), "hosts": hosts, "busy": sweep.busy}
    about["missing"] = missing
    say = print if rank == 0 else lambda *text, **how: None
    say(f"torch {torch.__version__}, {mpi + ', ' if mpi else ''}{table.place(hosts, sweep.busy)}")
    for name, why in missing.items():
        say(f"{name} is not timed: {why}")
    results = []
    with ranks.burning(sweep.busy if rank == 0 else 0):
        for name in sweep.operations:
            results += _of_operation(sweep, name, timed, ratio_to, say)
    about["load_after"] = [h["load"] for h in ranks.hosts()]
    say(f"\nload {'/'.join(format(load, '.1f') for load in about['load_after'])} after")
    if rank == 0:
        if sweep.json:
            with open(sweep.json, "w") as f:
                json.dump({**about, "results": results}, f, indent=1)
        if sweep.plot:
            picture.draw(sweep.plot, f"{dist.get_world_size()} ranks, {table.place(hosts, sweep.busy)}", results)
            say(sweep.plot)
    return any(r["wrong"] for r in results)
