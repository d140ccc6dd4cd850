"""What communication costs a DDP step: the step, the same without communication, and the difference, for each backend
and a few sizes of model.

A model WxL is L times Linear(W, W) with ReLU between; each rank has a batch of its own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import environment, ranks, references, table
from .busy import burning
from .step_time import measure

if TYPE_CHECKING:
    from .step_time import StepTime


_ROUNDS = 5  # at least: fewer say nothing


@dataclass(frozen=True)
class Ddp:
    models: tuple[tuple[int, ...], ...]  # (width, layers), ...
    batch: int
    against: tuple[str, ...]
    busy: int
    seconds: float  # of each model
    json: str | None


def _stepper(width: int, layers: int, batch: int, group: Any) -> tuple[DistributedDataParallel, Callable[[], None]]:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())][:-1]
    model = DistributedDataParallel(nn.Sequential(*parts), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, step


def _head(first: str) -> str:
    return (
        f"{'model':>8} {'parameters':>11} {'backend':>8} {'step ms':>9} {'local ms':>9} {'comm ms':>9} "
        f"{'quartiles':>15} "
        f"{'share':>7} {'comm / ' + first:>13}"
    )


def _row(model: str, parameters: int, name: str, t: StepTime, base: StepTime) -> str:
    quartiles = f"{t.spread[0]:.2f} to {t.spread[1]:.2f}"
    over = "-" if not base.comm else format(t.comm / base.comm, ".2f")
    return (
        f"{model:>8} {parameters:>11,} {name:>8} {t.step:>9.2f} {t.local:>9.2f} {t.comm:>9.2f} {quartiles:>15} "
        f"{t.share:>7.1%} {over:>13}"
    )


def run(ddp: Ddp) -> bool:
    """One rank's whole run; collective over the default group. False: nothing can be wrong with it."""
    hosts, rank = ranks.hosts(), dist.get_rank()
    timed, missing = references.make(ddp.against, len(hosts))
    groups = {n: r.group for n, r in timed.items() if isinstance(r, references.Backend) and r.checked}
    first = next(name for name in (*groups, "custom") if name != "custom" or len(groups) == 1)
    say = print if rank == 0 else lambda *text, **how: None
    say(
        f"torch {torch.__version__}, {table.place(hosts, ddp.busy)}\n\nDDP, {dist.get_world_size()} ranks, float32, "
        "batches "
        f"of {ddp.batch}; a step is as slow as its slowest rank;\nlocal: the same under no_sync; comm: step - local\n"
        f"{_head(first)}"
    )
    for name, why in missing.items():
        say(f"{name} is not timed: {why}")
    results = []
    with burning(ddp.busy if rank == 0 else 0):
        for width, layers in ddp.models:
            times = measure(
                groups,
                functools.partial(_stepper, width, layers, ddp.batch),
                ddp.seconds,
                lambda elapsed: None,
                _ROUNDS,
            )
            for name, t in times.items():
                model, parameters = f"{width}x{layers}", layers * width * (width + 1)
                say(_row(model, parameters, name, t, times[first]), flush=True)
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
