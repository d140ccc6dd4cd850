"""Trains a small network with DistributedDataParallel, shows that it learns what one process would learn, and
what communication costs beside gloo. Started plainly, it starts itself again under torchrun, or under mpiexec."""

import copy
import gzip
import hashlib
import os
import struct
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import demo_mpi
from bench.step_time import measure
from c10d_custom.launch.launcher import detect
from demo_options import parse_args
from demo_picture import draw

BATCH = 120  # images a step over all ranks; 1 to 6, 8, 10 and 12 ranks share it evenly


# Data


@dataclass
class Data:
    name: str
    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """One file of the format that MNIST is published in: magic, dimensions, then bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise FileNotFoundError(f"no {name} or {name}.gz in {folder}")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zeros, kind, ndim = struct.unpack_from(">HBB", raw)
    shape = struct.unpack_from(f">{ndim}I", raw, 4)
    if zeros or kind != 8 or len(raw) != 4 + 4 * ndim + int(np.prod(shape)):
        raise ValueError(f"{path} is not a whole IDX file of unsigned bytes")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape).copy())


def load_mnist(folder: Path) -> Data:
    x, y, test_x, test_y = (
        read_idx(folder, f"{part}-{what}-ubyte")
        for part in ("train", "t10k")
        for what in ("images-idx3", "labels-idx1")
    )
    return Data("MNIST", x.flatten(1) / 255, y.long(), test_x.flatten(1) / 255, test_y.long())


def load_digits() -> Data:
    from sklearn.datasets import load_digits as bundled  # slow to import, and not needed for MNIST

    digits = bundled()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(digits.data).float()[order] / 16
    y = torch.from_numpy(digits.target).long()[order]
    return Data("scikit-learn digits", x[360:], y[360:], x[:360], y[:360])


# Training


def make_model(pixels: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(pixels, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_step(model, optimizer, x, y) -> torch.Tensor:
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@dataclass
class Run:
    label: str
    loss: list[float] = field(default_factory=list)  # mean over an epoch's training steps
    accuracy: list[float] = field(default_factory=list)  # on the test images, after the epoch
    seconds: float = 0.0


def train(label: str, model: nn.Module, data: Data, batch: int, epochs: int, rank: int = 0, ranks: int = 1) -> Run:
    """Trains on global batches that do not depend on the number of ranks: each takes its slice of every batch."""
    optimizer = make_optimizer(model)
    steps = len(data.train_x) // batch
    run = Run(label)
    start = time.perf_counter()
    # A terminal gets a live bar, a log file a line now and then.
    with tqdm(
        total=epochs * steps,
        desc=label,
        unit="step",
        disable=rank != 0,
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else 5,
    ) as bar:
        for epoch in range(epochs):
            order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(1 + epoch))
            totals = torch.zeros(2, dtype=torch.float64)  # training loss, right answers
            for chosen in order[: steps * batch].view(steps, ranks, -1)[:, rank]:
                totals[0] += train_step(model, optimizer, data.train_x[chosen], data.train_y[chosen])
                bar.update()
            with torch.no_grad():
                guess = model(data.test_x[rank::ranks]).argmax(1)
            totals[1] = (guess == data.test_y[rank::ranks]).sum()
            if ranks > 1:
                dist.all_reduce(totals)
            run.loss.append(totals[0].item() / (steps * ranks))
            run.accuracy.append(totals[1].item() / len(data.test_y))
            bar.set_postfix(epoch=epoch + 1, loss=f"{run.loss[-1]:.4f}", accuracy=f"{run.accuracy[-1]:.1%}")
    run.seconds = time.perf_counter() - start
    return run


def parameter_hashes(model: nn.Module) -> list[str]:
    """Each rank's SHA-256 over the bytes of all its parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(hashes, mine)
    return [bytes(h.tolist()).hex() for h in hashes]


def time_beside_gloo(backend: str, data: Data, per_rank: int, seconds: float):
    """Step times on a group of the backend under test and on one of gloo."""
    names = [backend, "gloo" if backend != "gloo" else "gloo (again)"]
    groups = {name: dist.new_group(backend=kind) for name, kind in zip(names, (backend, "gloo"), strict=True)}
    mine = slice(dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank)
    x, y = data.train_x[mine], data.train_y[mine]

    def make_stepper(group):
        model = DistributedDataParallel(make_model(x.shape[1]), process_group=group)
        optimizer = make_optimizer(model)
        return model, lambda: train_step(model, optimizer, x, y)

    with tqdm(
        total=seconds,
        desc="timing the step",
        disable=dist.get_rank() != 0,
        dynamic_ncols=True,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s",
        mininterval=0.1 if sys.stderr.isatty() else 5,
    ) as bar:
        return measure(groups, make_stepper, seconds, lambda elapsed: bar.update(elapsed - bar.n))


# The report


def report(args, data, model_size, per_rank, distributed, single, furthest, hashes, times, load) -> None:
    apart = max(abs(a - b) for a, b in zip(distributed.loss, single.loss, strict=True))
    print(
        f"\n{args.epochs} epochs of {data.name}, {model_size:,} parameters, "
        f"{per_rank * args.ranks} images a step, torch {torch.__version__}\n"
    )
    print(f"  {'':<30}{'training loss':>15}{'test accuracy':>16}{'seconds':>10}")
    for run in (distributed, single):
        print(f"  {run.label:<30}{run.loss[-1]:>15.6f}{run.accuracy[-1]:>16.2%}{run.seconds:>10.1f}")
    print(
        f"  They agree to: loss {apart:.1e} (largest difference of any epoch), accuracy "
        f"{100 * abs(distributed.accuracy[-1] - single.accuracy[-1]):.2f} points, "
        f"parameters {furthest:.1e} (largest difference)"
    )
    if len(set(hashes)) == 1:
        print(f"  All {args.ranks} ranks hold bit-identical parameters: sha256 {hashes[0][:16]}...")
    else:
        print("  RANKS HOLD DIFFERENT PARAMETERS: " + ", ".join(f"rank {r} {h[:16]}" for r, h in enumerate(hashes)))

    ours, gloo = times.values()
    print(
        f"\nOne DDP step, {args.ranks} ranks, {4e-6 * model_size:.1f} MB of gradients, {per_rank} images a rank; "
        f"medians over {ours.rounds} alternating rounds"
    )
    print(
        f"  Load when the demo started: {load:.1f} on {os.cpu_count()} cores; other work widens the quartiles."
        + (" --quick has too few rounds to compare backends by." if args.quick else "")
        + "\n"
    )
    print(f"  {'':<14}{'step':>11}{'local step':>14}{'communication':>16}{'quartiles':>18}{'share of step':>16}")
    for name, t in times.items():
        quartiles = f"{t.spread[0]:.2f} to {t.spread[1]:.2f}"
        print(f"  {name:<14}{t.step:>8.2f} ms{t.local:>11.2f} ms{t.comm:>13.2f} ms{quartiles:>18}{t.share:>16.1%}")
    if ours.comm and gloo.comm:
        print(
            f"  {'ratio':<14}{ours.step / gloo.step:>8.2f}   {ours.local / gloo.local:>11.2f}   "
            f"{ours.comm / gloo.comm:>13.2f}{'':>21}{ours.share / gloo.share:>16.2f}"
        )
    print("  A step is as slow as its slowest rank; local: the same step under no_sync; communication: step - local.")


def main() -> int:
    args = parse_args()
    try:
        data = load_mnist(args.mnist) if args.mnist else load_digits()
    except (OSError, EOFError, ValueError, struct.error) as error:
        sys.exit(f"scripts/demo: {error}")
    if not (dist.is_torchelastic_launched() or args.mpi and detect() is not None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if args.mpi:
            return demo_mpi.start(args.ranks, args.hosts, sys.argv)
        if args.hosts > 1:
            return demo_mpi.start(args.ranks, args.hosts, sys.argv, "torchrun")
        os.execv(
            sys.executable,
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={args.ranks}",
                *sys.argv,
            ],
        )

    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    dist.init_process_group(args.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    per_rank = -(-BATCH // ranks)
    model = make_model(data.train_x.shape[1])
    untrained = copy.deepcopy(model)
    where = f" on {args.hosts} hosts" if args.hosts > 1 else ""
    distributed = train(
        f"{args.backend}, {ranks} ranks{where}",
        DistributedDataParallel(model),
        data,
        per_rank * ranks,
        args.epochs,
        rank,
        ranks,
    )
    hashes = parameter_hashes(model)
    times = time_beside_gloo(args.backend, data, per_rank, 4 if args.quick else 20)
    dist.destroy_process_group()
    if rank != 0:
        return 0

    # The other ranks have gone: a single process, on the same global batches.
    single = train("single process", untrained, data, per_rank * ranks, args.epochs)
    furthest = max((a - b).abs().max().item() for a, b in zip(model.parameters(), untrained.parameters(), strict=True))
    model_size = sum(p.numel() for p in model.parameters())
    report(args, data, model_size, per_rank, distributed, single, furthest, hashes, times, load)
    picture = draw(args.out, f"{data.name}, {model_size:,} parameters, {ranks} ranks", distributed, single, times)
    print(f"\nCurves and bars: {picture}")
    return 0 if len(set(hashes)) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
