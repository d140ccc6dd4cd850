"""Where the time of a small call goes: the same call begun at deeper and deeper layers, by turns in one run, and what
each layer adds.

A synchronous call passes torch's Python, the group's method, the core, and waits for the other ranks. A group of one
rank has nobody to wait for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, BarrierOptions

from c10d_custom.bench import environment, noop, ranks, table, timing
from c10d_custom.bench.timing import Plan, Timed
from c10d_custom.c10d.operations import FastPath, fast_path
from c10d_custom.call import Op

SIZES = (4, 1 << 10, 16 << 10)  # bytes
_SUM = dist.ReduceOp(dist.ReduceOp.SUM)
_TIMEOUT = 120 * 10**9  # ns

# What each column says, and the layers whose difference it is.
COLUMNS = (
    ("torch", "torch's Python, which calls the group's method", "whole", "method"),
    ("method", "the group's method: options read, tensors looked at", "method", "core"),
    ("core", "the core, of one rank alone", "alone", None),
    ("others", "waiting for the other ranks, and what comes from them", "core", "alone"),
)


@dataclass(frozen=True)
class CallSteps:
    plan: Plan
    json: str | None


def _core(group: Any, path: FastPath, tensors: list[torch.Tensor] | None) -> Callable[[], object]:
    fast = group._transport.fast_collective
    op, _, rooted, reduces = path
    return partial(fast, op, tensors, tensors, 0 if rooted else -1, _SUM if reduces else None, _TIMEOUT)


def _layers(name: str, tensor: torch.Tensor, group: Any, alone: Any, nothing: Any) -> dict[str, Callable[[], object]]:
    """{layer: what begins there}, of one operation on ``tensor``."""
    if name == "barrier":
        options: Any = BarrierOptions()
        options.asyncOp = False
        return {
            "whole": partial(dist.barrier, group),
            "method": partial(group.barrier, opts=options),
            "core": _core(group, fast_path(Op.barrier, BarrierOptions), None),
            "alone": _core(alone, fast_path(Op.barrier, BarrierOptions), None),
            "noop": partial(dist.barrier, nothing),
        }
    options = AllreduceOptions()
    options.reduceOp, options.asyncOp = _SUM, False
    return {
        "whole": partial(dist.all_reduce, tensor, group=group),
        "method": partial(group.allreduce, [tensor], options),
        "core": _core(group, fast_path(Op.all_reduce, AllreduceOptions), [tensor]),
        "alone": _core(alone, fast_path(Op.all_reduce, AllreduceOptions), [tensor]),
        "noop": partial(dist.all_reduce, tensor, group=nothing),
    }


def _medians(layers: dict[str, Callable[[], object]], plan: Plan) -> dict[str, float]:
    """{layer: microseconds of a call}."""
    timed = {name: Timed(call, dist.barrier, 1, True) for name, call in layers.items()}
    return {name: 1e6 * float(torch.tensor(t).median()) for name, t in timing.times(timed, plan).items()}


def steps(layers: dict[str, float]) -> dict[str, float]:
    """{column: microseconds} of {layer: microseconds}; they add up to the whole."""
    return {column: layers[outer] - (layers[inner] if inner else 0.0) for column, _, outer, inner in COLUMNS}


def run(todo: CallSteps) -> bool:
    """One rank's whole run; collective over the default group. False: nothing can be wrong with it."""
    hosts, size, rank = ranks.hosts(), dist.get_world_size(), dist.get_rank()
    if len(hosts) > 1:
        raise SystemExit("bench steps: takes the calls of one host apart")
    noop.register()
    group, nothing = dist.group.WORLD, dist.new_group(backend=noop.NAME)
    alone = [dist.new_group([r]) for r in range(size)][rank]
    say = print if rank == 0 else lambda *text, **how: None
    say(f"torch {torch.__version__}, {size} ranks, {table.place(hosts)}\n\nmicroseconds, medians:")
    for column, what, *_ in COLUMNS:
        say(f"  {column:<7} {what}")
    head = "".join(f"{column:>9}" for column, *_ in COLUMNS)
    say(f"\n{'operation':<12}{'bytes':>8}{head}{'whole':>9}{'noop':>9}{'over noop':>11}")
    results = []
    for name, nbytes in [*(("all_reduce", n) for n in SIZES), ("barrier", 0)]:
        layers = _medians(_layers(name, torch.zeros(nbytes // 4), group, alone, nothing), todo.plan)
        parts = "".join(f"{us:>9.2f}" for us in steps(layers).values())
        whole, empty = layers["whole"], layers["noop"]
        say(f"{name:<12}{nbytes:>8}{parts}{whole:>9.2f}{empty:>9.2f}{whole - empty:>11.2f}", flush=True)
        results.append({"operation": name, "bytes": nbytes, "layers_us": layers})
    after = "/".join(format(h["load"], ".1f") for h in ranks.hosts())
    say(f"\nload {after} after")
    if rank == 0 and todo.json:
        with open(todo.json, "w") as f:
            json.dump({**environment.about(), "ranks": size, "hosts": hosts, "steps": results}, f, indent=1)
    return False
