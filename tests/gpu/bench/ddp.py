"""The step of DistributedDataParallel: "custom" beside gloo and beside the same step without communication."""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ..device import device_of
from . import ranks
from .session import ROUNDS, OutOfTime, Session
from .timing import calls_for, figure, take

# Width of six square layers: parameters in all.
WIDTHS = {128: "0.1 M", 512: "1.6 M", 2048: "25 M", 4096: "101 M"}
NAMES = ("custom", "gloo", "local")


@functools.lru_cache(maxsize=3)
def stepper(kind, name, width):
    """One training step as a function, on a model of this rank's own."""
    device = device_of(kind)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU()))).to(device.name)
    if name != "local":
        model = DDP(model, device_ids=device.ids, process_group=ranks.reference(name).group)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), device.put(torch.randn(32, width))

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def block(kind, name, width, calls):
    step = stepper(kind, name, width)
    step()
    device_of(kind).synchronize()
    dist.barrier()
    return take(step, device_of(kind), calls)


def drop():
    stepper.cache_clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def steps(pool, width):
    """{name: Figure}"""
    kind, blocks, calls = pool.session.device, {name: [] for name in NAMES}, {}
    for name in NAMES:
        first = pool.run(block, kind, name, width, 3)
        calls[name] = calls_for(max(min(t.single) for t in first), 0.3, most=60)
    for _ in range(ROUNDS):
        for name in NAMES:
            blocks[name].append(pool.run(block, kind, name, width, calls[name]))
    return {name: figure(b) for name, b in blocks.items()}


def main():
    session = Session(__doc__)
    print(
        f"step of 6 x Linear, batch of 32 each, milliseconds\n{'ranks':>5} {'parameters':>11} {'custom':>9} "
        f"{'gloo':>9} {'local':>9} "
        f"{'gloo/custom':>12} {'share of gloo s communication':>30}"
    )
    for size in (4, 2):
        if not session.wants(size):
            continue
        with session.pool(size) as pool:
            for width, parameters in WIDTHS.items():
                if 24 * width**2 > session.largest * 2:
                    continue
                if session.left() < 4:
                    session.left_out += 1
                    continue
                try:
                    timed = steps(pool, width)
                except OutOfTime:
                    session.left_out += 1
                    break
                ours, gloo, local = (timed[name].single * 1e3 for name in NAMES)
                print(
                    f"{size:>5} {parameters:>11} {ours:>9.2f} {gloo:>9.2f} {local:>9.2f} {gloo / ours:>12.2f} "
                    f"{(ours - local) / max(gloo - local, 1e-9):>30.2f}",
                    flush=True,
                )
                for name, found in timed.items():
                    session.add(
                        operation="ddp", ranks=size, parameters=6 * width * (width + 1), backend=name, **found.as_json()
                    )
                pool.run(drop)
    session.finish()


if __name__ == "__main__":
    main()
