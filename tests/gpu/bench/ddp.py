"""The step of DistributedDataParallel: "custom" beside gloo, NCCL where it can, and the same step without
communication."""

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
LOCAL = "local"


@functools.lru_cache(maxsize=4)
def stepper(kind, name, width):
    """One training step as a function, on a model of this rank's own."""
    device = device_of(kind)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU()))).to(device.name)
    if name != LOCAL:
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


def steps(pool, width, names):
    """{name: Figure}"""
    kind, blocks, calls = pool.session.device, {}, {}
    for name in names:
        if (first := pool.first(name, block, kind, name, width, 3)) is not None:
            calls[name], blocks[name] = calls_for(max(min(t.single) for t in first), 0.3, most=60), []
    for _ in range(ROUNDS):
        for name in blocks:
            blocks[name].append(pool.run(block, kind, name, width, calls[name]))
    return {name: figure(b) for name, b in blocks.items()}


def main():
    session = Session(__doc__)
    print("step of 6 x Linear, batch of 32 each, milliseconds; (share): of that one's communication, ours")
    for size in (4, 2):
        if not session.wants(size):
            continue
        names = ("custom", LOCAL, *session.others(size))
        print(
            f"{'ranks':>5} {'parameters':>11}"
            + "".join(f"{name:>9}" for name in names[:2])
            + "".join(f"{name:>16}" for name in names[2:])
        )
        with session.pool(size) as pool:
            for width, parameters in WIDTHS.items():
                if 24 * width**2 > session.largest * 2:
                    continue
                if session.left() < 4:
                    session.left_out += 1
                    continue
                try:
                    timed = steps(pool, width, names)
                except OutOfTime:
                    session.left_out += 1
                    break
                ms = {name: found.single * 1e3 for name, found in timed.items()}
                ours = ms["custom"] - ms[LOCAL]
                told = [
                    f"{ms[n]:>9.2f} ({ours / max(ms[n] - ms[LOCAL], 1e-9):.2f})" if n in ms else f"{'-':>16}"
                    for n in names[2:]
                ]
                print(f"{size:>5} {parameters:>11}{ms['custom']:>9.2f}{ms[LOCAL]:>9.2f}" + "".join(told), flush=True)
                for name, found in timed.items():
                    session.add(
                        operation="ddp", ranks=size, parameters=6 * width * (width + 1), backend=name, **found.as_json()
                    )
                pool.run(drop)
    session.finish()


if __name__ == "__main__":
    main()
