"""What small calls cost, of the kinds that a program makes most: synchronous, asynchronous, several under way,
messages; and the steps of an asynchronous one. Beside other backends, by turns."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from c10d_custom.bench import environment, noop, ranks, references, table
from c10d_custom.bench.case import there_and_back
from c10d_custom.bench.references import Backend
from c10d_custom.bench.timing import Plan, Timed, times

IN_FLIGHT = 16
_SETTLE = 0.0005  # s, after a barrier: for backends whose operations end in threads of their own

Times = dict[str, list[float]]  # of each backend: seconds, a median for each block


@dataclass(frozen=True)
class SmallCalls:
    against: tuple[str, ...]
    plan: Plan
    json: str | None


def _work(started: Any) -> dist.Work:
    assert started is not None, "this rank is in the group"
    return started


def _calls(group: Any) -> dict[str, Callable[[], object]]:
    """What is timed as a whole. Messages are between the first rank and the last; the others do nothing then."""
    few, many = torch.zeros(1), torch.zeros(256)
    several = [torch.zeros(256) for _ in range(IN_FLIGHT)]
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    peer, received = last - rank, torch.zeros(256)

    def start(t: torch.Tensor) -> dist.Work:
        return _work(dist.all_reduce(t, group=group, async_op=True))

    def in_flight() -> None:
        for work in [start(t) for t in several]:
            work.wait()

    def one_by_one() -> None:
        for t in several:
            dist.all_reduce(t, group=group)

    def both_ways() -> None:
        sent = _work(dist.isend(many, group=group, group_dst=peer))
        _work(dist.irecv(received, group=group, group_src=peer)).wait()
        sent.wait()

    def futures() -> None:
        for future in [start(t).get_future() for t in several]:
            future.wait()

    messages = rank in (0, last)
    round_trip = there_and_back(
        rank, lambda: dist.send(few, group=group, group_dst=peer), lambda: dist.recv(few, group=group, group_src=peer)
    )
    return {
        "all_reduce, 4 B": lambda: dist.all_reduce(few, group=group),
        "all_reduce, 1 KB": lambda: dist.all_reduce(many, group=group),
        "barrier": lambda: dist.barrier(group),
        "send + recv, 4 B": round_trip if messages else lambda: None,
        "isend + irecv, 1 KB": both_ways if messages else lambda: None,
        "async, 1 KB": lambda: start(many).wait(),
        "async, 1 KB, by its future": lambda: start(many).get_future().wait(),
        f"{IN_FLIGHT} in flight, 1 KB": in_flight,
        f"{IN_FLIGHT} in flight, by futures": futures,
        f"{IN_FLIGHT} one by one, 1 KB": one_by_one,
    }


def _steps(group: Any) -> dict[str, float]:
    """Seconds of each step of an asynchronous all_reduce of 1 KB, one by one: means over some that are under way
    together. What is awaited, asked or given a future has ended before."""
    tensors = [torch.zeros(256) for _ in range(IN_FLIGHT)]
    clock = time.perf_counter
    taken = {}

    def step(name: str, of_each: Callable[[Any], Any], things: list[Any]) -> list[Any]:
        began = clock()
        got = [of_each(thing) for thing in things]
        taken[name] = (clock() - began) / len(things)
        return got

    def issue() -> list[Any]:
        dist.barrier()
        works = step("to issue it", lambda t: dist.all_reduce(t, group=group, async_op=True), tensors)
        dist.barrier(group)  # collectives go in their order
        time.sleep(_SETTLE)
        return works

    works = issue()
    step("wait()", lambda work: work.wait(), works)
    step("wait(), again", lambda work: work.wait(), works)
    step("is_completed()", lambda work: work.is_completed(), issue())
    futures = step("get_future()", lambda work: work.get_future(), issue())
    step("its future's wait()", lambda future: future.wait(), futures)
    return taken


def _timed_steps(backends: dict[str, Backend], plan: Plan) -> dict[str, Times]:
    rows: dict[str, Times] = {}
    for _ in range(plan.rounds):
        for name, backend in backends.items():
            until = time.perf_counter() + plan.seconds
            found: dict[str, list[float]] = {}
            more = torch.ones(1)
            while more.item():
                for step, seconds in _steps(backend.group).items():
                    found.setdefault(step, []).append(seconds)
                more.fill_(time.perf_counter() < until)
                dist.broadcast(more, src=0)
            for step, all_seconds in found.items():
                rows.setdefault(step, {}).setdefault(name, []).append(statistics.median(all_seconds))
    return rows


def _blocks(seconds: list[float], rounds: int) -> list[float]:
    """The median of each block of calls, which are all of one length."""
    each = len(seconds) // rounds
    return [statistics.median(seconds[i * each : (i + 1) * each]) for i in range(rounds)]


def _timed_calls(backends: dict[str, Backend], plan: Plan) -> dict[str, Times]:
    calls = {name: _calls(backend.group) for name, backend in backends.items()}
    rows = {}
    for what in next(iter(calls.values())):
        part = dist.get_rank() in (0, dist.get_world_size() - 1) or "send" not in what
        timed = {name: Timed(calls[name][what], backends[name].barrier, 1, part) for name in backends}
        rows[what] = {name: _blocks(seconds, plan.rounds) for name, seconds in times(timed, plan).items()}
    return rows


def _head(names: list[str], first: str) -> str:
    cells = "".join(f"{name + ' us':>11} {'of the blocks':>17}" for name in names)
    return f"{'':<28}{cells} {'x ' + first:>8} {'over ' + noop.NAME:>10}"


def _row(what: str, times_: Times, first: str) -> str:
    """The ratio is the median of the blocks' ratios: a block of ours and the one of ``first`` that followed it."""
    cells = "".join(
        f"{1e6 * statistics.median(blocks):>11.2f} {f'{1e6 * min(blocks):.2f} to {1e6 * max(blocks):.2f}':>17}"
        for blocks in times_.values()
    )
    ours, nothing = times_["custom"], times_.get(noop.NAME)
    ratio = statistics.median(b / a for a, b in zip(ours, times_[first]))
    over = "-" if nothing is None else f"{1e6 * statistics.median(a - b for a, b in zip(ours, nothing)):.2f}"
    return f"{what:<28}{cells} {ratio:>8.1f} {over:>10}"


def run(small: SmallCalls) -> bool:
    """One rank's whole run; collective over the default group. False: nothing can be wrong with it."""
    hosts, rank = ranks.hosts(), dist.get_rank()
    timed, missing = references.make(small.against, len(hosts))
    backends = {name: r for name, r in timed.items() if isinstance(r, Backend)}
    names, first = list(backends), next((n for n in backends if n != "custom"), "custom")
    say = print if rank == 0 else lambda *text, **how: None
    say(
        f"torch {torch.__version__}, {table.place(hosts)}\n\n{dist.get_world_size()} ranks; "
        f"{table.HOW[small.plan.average]}; medians over {small.plan.rounds} blocks, the least block's median to the "
        "greatest's\n"
    )
    for name, why in missing.items():
        say(f"{name} is not timed: {why}")
    results: list[dict[str, Any]] = []
    steps = f"\nthe steps of an asynchronous call, {IN_FLIGHT} at a time\n"
    for title, measure in (("", _timed_calls), (steps, _timed_steps)):
        say(title + _head(names, first))
        for what, by_name in measure(backends, replace(small.plan, calls=None)).items():
            say(_row(what, by_name, first), flush=True)
            results += [{"what": what, "reference": n, "blocks_us": [1e6 * s for s in t]} for n, t in by_name.items()]
    load = [h["load"] for h in ranks.hosts()]
    say(f"\nload {'/'.join(format(x, '.1f') for x in load)} after")
    if rank == 0 and small.json:
        about = {**environment.about(), "ranks": dist.get_world_size(), "hosts": hosts, "load_after": load}
        with open(small.json, "w") as f:
            json.dump({**about, "small_calls": results}, f, indent=1)
    return False
