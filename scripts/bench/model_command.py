"""``python scripts/bench model``: the simulator's command line and tables.

Predicts all_reduce, flat and hierarchical, and a DDP step, from 2 to 4,096 hosts, or the start-up of so many, with
parameters given or fitted to measurements. A prediction is as good as its fit: see the table of errors.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from c10d_custom.bench.picture import readable

from . import start_up
from .model import Job, Machine, Settings, Training, bytes_leaving, efficiency, flat, hierarchical, step
from .picture import draw

if TYPE_CHECKING:
    from .fit import Point


HOSTS = tuple(1 << k for k in range(1, 13))
NAMES = {"custom": "hierarchical", "mpi": "flat"}  # reference in a bench file: algorithm


def _size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _setting(*kinds: type[Any]) -> Callable[[str], tuple[str, float]]:
    """A parameter of one of these."""
    names = [f.name for kind in kinds for f in fields(kind) if f.name != "shared"]

    def setting(text: str) -> tuple[str, float]:
        name, _, value = text.partition("=")
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name}: of {', '.join(names)}")
        return name, float(value)

    return setting


def _of(kind: type[Any], settings: list[tuple[str, float]]) -> dict[str, float]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in settings if name in names}


def add_to(commands: Any) -> None:
    """Adds the command to an argparse parser's subparsers, with what it `run`s."""
    model = commands.add_parser(
        "model", help="predict all_reduce, DDP steps and start-up over many hosts", description=__doc__.split("\n\n")[1]
    )
    model.add_argument("--fit", nargs="+", default=[], metavar="FILE", help="fit to files of bench --json")
    model.add_argument(
        "--one-machine",
        action="store_true",
        help="the fitted runs' hosts were namespaces of one machine, whose cores they shared",
    )
    model.add_argument(
        "--fastest",
        dest="figure",
        action="store_const",
        const="min_us",
        default="median_us",
        help="fit to each size's fastest call instead of the median, as on a busy machine",
    )
    model.add_argument(
        "--keep", type=_list(str), default=[], metavar="NAME[,NAME...]", help="parameters that a fit leaves as they are"
    )
    model.add_argument(
        "--set",
        type=_setting(Machine),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter, in seconds or bytes per second: "
        + ", ".join(f"{f.name} ({f.default:g})" for f in fields(Machine) if f.name != "shared")
        + "; a fit starts from it",
    )
    model.add_argument(
        "--then",
        type=_setting(Machine, start_up.Machine),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter changed after the fit, as for another network",
    )
    model.add_argument(
        "--start-up",
        nargs="*",
        metavar="FILE",
        help="instead: what it takes to make the first group, with MPI over the store; fit to files of "
        "tests/mpi/start_up.py --json",
    )
    model.add_argument("--hosts", type=_list(int), default=list(HOSTS), metavar="N[,N...]", help="default: 2 to 4096")
    model.add_argument("--ranks-per-host", type=int, default=4, help="default: %(default)s")
    model.add_argument(
        "--sizes",
        type=_list(_size),
        default="4,64K,1M,16M,64M",
        metavar="BYTES[,BYTES...]",
        help="default: %(default)s",
    )
    model.add_argument(
        "--chunk",
        type=_size,
        default=Settings.chunk,
        metavar="BYTES",
        help="of our pipeline, in what is predicted beyond the fit (default: 1M)",
    )
    model.add_argument(
        "--small",
        type=_size,
        default=Settings.small,
        metavar="BYTES",
        help="up to this, everything in one exchange (default: 8K)",
    )
    model.add_argument(
        "--parameters", type=_size, default=Training.parameters, help="DDP: bytes of gradients (default: 100M)"
    )
    model.add_argument("--bucket", type=_size, default=Training.bucket, help="DDP: bytes of a bucket (default: 25M)")
    model.add_argument("--forward", type=float, default=Training.forward, help="DDP: seconds (default: %(default)s)")
    model.add_argument("--backward", type=float, default=Training.backward, help="DDP: seconds (default: %(default)s)")
    model.add_argument(
        "--overlap",
        type=float,
        default=Training.overlap,
        help="DDP: share of communication that runs beside the backward pass (default: %(default)s)",
    )
    model.add_argument("--plot", metavar="FILE", help="also draw a picture; needs matplotlib")
    model.set_defaults(run=main)


def _predicted(point: Point, machines: dict[str, Machine]) -> float:
    name = NAMES[point.reference]
    predict: dict[str, Callable[..., float]] = {"hierarchical": hierarchical, "flat": flat}
    return predict[name](point.job, machines[name], point.bytes)


def _print_fit(points: list[Point], machines: dict[str, Machine]) -> None:
    print(f"{'algorithm':>12} " + " ".join(f"{f.name:>11}" for f in fields(Machine) if f.name != "shared"))
    for name, machine in machines.items():
        print(
            f"{name:>12} "
            + " ".join(f"{getattr(machine, f.name):>11.3g}" for f in fields(Machine) if f.name != "shared")
        )
    if not points:
        return
    from .fit import errors

    print(
        f"\n{'algorithm':>12} {'ranks on hosts':>14} {'bytes':>10} {'measured us':>12} {'predicted us':>12} "
        f"{'error':>7}"
    )
    for p in points:
        seconds = _predicted(p, machines)
        print(
            f"{NAMES[p.reference]:>12} {'+'.join(map(str, p.job.ranks)):>14} {p.bytes:>10} {p.seconds * 1e6:>12.1f} "
            f"{seconds * 1e6:>12.1f} {seconds / p.seconds - 1:>+7.0%}"
        )
    for reference, name in NAMES.items():
        mine = [p for p in points if p.reference == reference]
        if mine:
            off = sorted(abs(errors(mine, machines[name])))
            print(f"{name}: median error {off[len(off) // 2]:.0%}, largest {off[-1]:.0%}, of {len(mine)} times")


def _fitted(args: Any) -> tuple[list[Point], dict[str, Machine]]:
    """(points, {algorithm: Machine})"""
    start = Machine(**dict(args.set), shared=args.one_machine)
    machines = dict.fromkeys(NAMES.values(), start)
    if not args.fit:
        return [], machines
    from .fit import FITTED, fit, read

    points = read(args.fit, args.figure)
    if not points:
        raise SystemExit("no all_reduce of custom or mpi in these files")
    for reference, name in NAMES.items():
        mine = [p for p in points if p.reference == reference]
        if mine:
            machines[name] = fit(mine, start, tuple(n for n in FITTED if n not in args.keep))
        else:
            print(f"{name}: nothing measured, so its parameters are those of the other")
    for reference, name in NAMES.items():
        if not any(p.reference == reference for p in points):
            machines[name] = next(m for n, m in machines.items() if n != name)
    return points, machines


def main(args: Any) -> int:
    """Fits if asked to, and prints what the model predicts: seconds of all_reduce and of a DDP step, or of start-up.
    The exit status, 0; SystemExit where the files to fit to hold nothing of ours or of MPI's."""
    if args.start_up is not None:
        return start_up.main(args.start_up, args.hosts, args.ranks_per_host, _of(start_up.Machine, args.then))
    points, machines = _fitted(args)
    _print_fit(points, machines)
    compared = [(p, _predicted(p, machines)) for p in points]
    # What is predicted are real hosts, each with its own cores.
    machines = {name: replace(m, shared=False, **_of(Machine, args.then)) for name, m in machines.items()}
    settings = Settings(args.chunk, args.small)
    predict: dict[str, Callable[..., float]] = {
        "hierarchical": lambda *what: hierarchical(*what, settings),
        "flat": flat,
    }
    training = Training(
        args.parameters, args.bucket, forward=args.forward, backward=args.backward, overlap=args.overlap
    )
    jobs = [Job.even(n, args.ranks_per_host) for n in args.hosts]
    curves = {name: {s: [predict[name](job, m, s) for job in jobs] for s in args.sizes} for name, m in machines.items()}
    scaling = {
        name: [efficiency(functools.partial(predict[name], job, m), training) for job in jobs]
        for name, m in machines.items()
    }
    print(
        f"\npredicted all_reduce in us, {args.ranks_per_host} ranks per host: hierarchical / flat\n"
        f"{'hosts':>6} " + " ".join(f"{readable(s):>21}" for s in args.sizes)
    )
    for i, n in enumerate(args.hosts):
        print(
            f"{n:>6} "
            + " ".join(
                f"{curves['hierarchical'][s][i] * 1e6:>10.0f} /{curves['flat'][s][i] * 1e6:>9.0f}" for s in args.sizes
            )
        )
    print(
        f"\nbytes that leave each host, of {readable(max(args.sizes))}: "
        + ", ".join(
            f"{n} hosts {bytes_leaving(job, max(args.sizes)) / max(args.sizes):.3f}x"
            for n, job in zip(args.hosts[:3], jobs, strict=False)
        )
    )
    compute = training.forward + training.backward
    print(
        f"\npredicted DDP step, {readable(training.parameters)} of gradients, {compute:g} s of computing: "
        f"hierarchical / flat\n{'hosts':>6} {'step s':>19} {'computing':>15}"
    )
    for i, (n, job) in enumerate(zip(args.hosts, jobs, strict=True)):
        steps = [step(functools.partial(predict[name], job, m), training) for name, m in machines.items()]
        print(
            f"{n:>6} {steps[0]:>9.3f} /{steps[1]:>8.3f} {scaling['hierarchical'][i]:>7.0%} /{scaling['flat'][i]:>6.0%}"
        )
    if args.plot:
        measured = {
            name: [
                (p.job.hosts, p.bytes, p.seconds, expected) for p, expected in compared if NAMES[p.reference] == name
            ]
            for name in machines
        }
        draw(
            args.plot,
            f"{args.ranks_per_host} ranks per host, beta {machines['hierarchical'].beta:.3g} B/s, "
            f"alpha {machines['hierarchical'].alpha:.3g} s",
            args.hosts,
            args.sizes,
            curves,
            measured,
            scaling,
        )
        print(f"\n{args.plot}")
    return 0
