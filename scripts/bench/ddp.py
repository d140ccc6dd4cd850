"""What communication costs a DDP step: the step, the same without communication, and the difference, for each backend
and a few models.

Each rank has a batch of its own. What a group that does nothing costs is torch's own part: DDP copies gradients
together and apart again, whoever reduces them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from c10d_custom.bench import environment, noop, ranks, references, table
from c10d_custom.bench.ranks import burning

from . import models
from .step_time import measure

if TYPE_CHECKING:
    from .step_time import StepTime


_ROUNDS = 5  # at least: fewer say nothing


@dataclass(frozen=True)
class Ddp:
    models: tuple[str, ...]  # names, as in models.py
    batch: int
    against: tuple[str, ...]
    busy: int
    seconds: float  # of each model
    json: str | None


def _stepper(name: str, batch: int, group: Any) -> tuple[DistributedDataParallel, Callable[[], None]]:
    made = models.make(name)
    model = DistributedDataParallel(made.module, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = made.inputs(batch, torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, step


def _head(first: str) -> str:
    return (
        f"{'model':>11} {'parameters':>11} {'backend':>8} {'step ms':>9} {'local ms':>9} {'comm ms':>9} "
        f"{'quartiles':>15} "
        f"{'share':>7} {'comm / ' + first:>13} {'less torch':>10}"
    )


def _over(ours: float, theirs: float) -> str:
    return format(ours / theirs, ".2f") if theirs > 0 else "-"


def _row(model: str, parameters: int, name: str, times: dict[str, StepTime], first: str) -> str:
    t, base, nothing = times[name], times[first], times.get(noop.NAME)
    quartiles = f"{t.spread[0]:.2f} to {t.spread[1]:.2f}"
    own = "-" if nothing is None else _over(t.comm - nothing.comm, base.comm - nothing.comm)
    return (
        f"{model:>11} {parameters:>11,} {name:>8} {t.step:>9.2f} {t.local:>9.2f} {t.comm:>9.2f} {quartiles:>15} "
        f"{t.share:>7.1%} {_over(t.comm, base.comm):>13} {own:>10}"
    )


def run(ddp: Ddp) -> bool:
    """One rank's whole run; collective over the default group. False: nothing can be wrong with it."""
    hosts, rank = ranks.hosts(), dist.get_rank()
    timed, missing = references.make(ddp.against, len(hosts))
    groups = {n: r.group for n, r in timed.items() if isinstance(r, references.Backend)}
    first = next(name for name in (*groups, "custom") if name != "custom" or len(groups) == 1)
    say = print if rank == 0 else lambda *text, **how: None
    say(
        f"torch {torch.__version__}, {table.place(hosts, ddp.busy)}\n\nDDP, {dist.get_world_size()} ranks, float32, "
        "batches "
        f"of {ddp.batch}; a step is as slow as its slowest rank;\nlocal: the same under no_sync; comm: step - local; "
        f"less torch: comm / {first}, less what {noop.NAME} costs in both\n"
        f"{_head(first)}"
    )
    for name, why in missing.items():
        say(f"{name} is not timed: {why}")
    results = []
    with burning(ddp.busy if rank == 0 else 0):
        for model in ddp.models:
            parameters = models.make(model).parameters
            times = measure(
                groups, functools.partial(_stepper, model, ddp.batch), ddp.seconds, lambda elapsed: None, _ROUNDS
            )
            for name, t in times.items():
                say(_row(model, parameters, name, times, first), flush=True)
                results.append(
                    {
                        "model": model,
                        "parameters": parameters,
                        "reference": name,
                        **asdict(t),
                        "comm": t.comm,
                        "share": t.share,
                    }
                )
    say(f"\nload {'/'.join(format(h['load'], '.1f') for h in ranks.hosts())} after")
    if rank == 0 and ddp.json:
        with open(ddp.json, "w") as f:
            json.dump(
                {
                    **environment.about(),
                    "ranks": dist.get_world_size(),
                    "hosts": hosts,
                    "busy": ddp.busy,
                    "ddp": results,
                },
                f,
                indent=1,
            )
    return False
