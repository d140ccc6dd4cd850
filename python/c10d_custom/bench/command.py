"""``python -m c10d_custom bench``: the command line.

Times collectives beside other backends, raw MPI and the memory floor: in the same ranks, in one run, by turns, so that
what else the machine does hits all alike. Figures are medians; the load is printed, because a busy machine changes
them."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .. import dtypes
from . import machine, ranks, references, sweep
from .case import REDUCING, ROOTED, dtype_named, name_of
from .operations import KNOWN, OPERATIONS
from .timing import AVERAGES, Plan
from .values import REDOPS

if TYPE_CHECKING:
    import torch


_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_REDOP_NAMES = {"prod": "PRODUCT"}  # nccl-tests' name


def size_in_bytes(text: str) -> int:
    """ "64K": 65536. ArgumentTypeError below 1 byte, ValueError for what is no number."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    value = int(text[:-1] if unit > 1 else text) * unit
    if value < 1:
        raise argparse.ArgumentTypeError("sizes start at 1 byte")
    return value


def backends(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if "custom" in names or "" in names:
        raise argparse.ArgumentTypeError("names other backends or libraries, noop or floor; custom is always timed")
    if unknown := [name for name in names if not references.known(name)]:
        raise argparse.ArgumentTypeError(f"no such backend: {', '.join(unknown)}")
    return names


def _threads(text: str) -> tuple[str, ...]:
    names = tuple(f"threads{positive(number)}" for number in text.split(","))
    if not all(map(references.known, names)):
        raise argparse.ArgumentTypeError("at most 64")
    return names


def _operations(text: str) -> tuple[str, ...]:
    names = tuple(OPERATIONS) if text == "all" else tuple(dict.fromkeys(text.split(",")))
    if unknown := sorted(set(names) - set(KNOWN)):
        raise argparse.ArgumentTypeError(f"no such operation: {', '.join(unknown)}; of {', '.join(KNOWN)}")
    return names


def _dtype(text: str) -> torch.dtype:
    try:
        dtype = dtype_named(text)
    except KeyError:
        raise argparse.ArgumentTypeError(f"no such dtype: {text}") from None
    if dtype not in dtypes.BY_DTYPE or not (dtype.is_floating_point or dtype.is_complex or text[0] in "iub"):
        raise argparse.ArgumentTypeError(f"{text} is not a dtype of numbers")
    return dtype


def _redop(text: str) -> str:
    name = _REDOP_NAMES.get(text.lower(), text.upper())
    if name not in REDOPS:
        raise argparse.ArgumentTypeError(f"no such reduction: {text}; of {', '.join(REDOPS).lower()}")
    return name


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _calls(text: str) -> int | None:
    return None if text == "0" else positive(text)


def add_to(commands: Any, name: str = "bench", rank: Callable[[sweep.Sweep], object] = sweep.run) -> None:
    """Adds the command to an argparse parser's subparsers, with what it `run`s. ``rank``: what each rank does."""
    bench = commands.add_parser(
        name,
        help="time collectives beside other backends and raw MPI",
        description=__doc__.split("\n\n")[1],
        epilog="Starts its ranks itself; under torchrun or mpirun, each process is one rank: "
        "mpirun -n 4 python -m c10d_custom bench --against gloo,mpi",
    )
    bench.add_argument(
        "operations",
        type=_operations,
        nargs="?",
        default="all_reduce",
        metavar="OPERATION[,...]",
        help=f"of {', '.join(KNOWN)}; all, but windows (default: %(default)s)",
    )
    what = bench.add_argument_group("what is called")
    what.add_argument(
        "-b", "--begin", type=size_in_bytes, default="4", metavar="BYTES", help="smallest size (default: %(default)s)"
    )
    what.add_argument(
        "-e", "--end", type=size_in_bytes, default="64M", metavar="BYTES", help="largest size (default: %(default)s)"
    )
    what.add_argument("-f", "--factor", type=int, default=4, help="from one size to the next (default: %(default)s)")
    what.add_argument("-d", "--dtype", type=_dtype, default="float32", help="default: %(default)s")
    what.add_argument(
        "-o",
        "--redop",
        type=_redop,
        default="sum",
        metavar="REDOP",
        help=f"of {', '.join(REDOPS).lower()} (default: %(default)s)",
    )
    what.add_argument("--root", type=int, default=0, help="rank (default: %(default)s)")
    what.add_argument("--async", dest="asynchronous", action="store_true", help="async_op=True, then wait()")
    where = bench.add_argument_group("where")
    where.add_argument("-r", "--ranks", type=int, help="processes to start (default: 2)")
    where.add_argument(
        "--against",
        type=backends,
        default="gloo",
        metavar="NAME[,...]",
        help="other backends; mpi: raw MPI by mpi4py, under mpirun, or torchrun over several hosts; deepspeed: its "
        "all_reduce in shared memory; noop: a ProcessGroup that does nothing; floor: all ranks copy so many bytes at "
        "once; empty: ours, on tensors of c10d_custom.empty; store: of windows, bare stores and loads; "
        "what cannot be had here is left out, and said "
        "(default: %(default)s)",
    )
    where.add_argument(
        "--threads",
        type=_threads,
        default=(),
        metavar="N[,...]",
        help="instead of --against: custom with so many threads in each rank (C10D_CUSTOM_THREADS), the ratio to the "
        "first number of them",
    )
    where.add_argument(
        "--ratio-to", metavar="NAME", help="what the last column compares with (default: the first of --against)"
    )
    where.add_argument("--busy", type=int, default=0, metavar="N", help="meanwhile N more processes burn a core each")
    how = bench.add_argument_group("how it is timed")
    how.add_argument(
        "-n", "--calls", type=_calls, help="timed calls of each (default: what fits --rounds times --seconds)"
    )
    how.add_argument(
        "-w", "--warmup", type=int, default=1, help="untimed calls before each block (default: %(default)s)"
    )
    how.add_argument(
        "-a",
        "--average",
        choices=AVERAGES,
        default="mean",
        help="what the ranks' times of one call become (default: %(default)s)",
    )
    how.add_argument(
        "--alternate",
        choices=("block", "call"),
        default="block",
        help="take turns after blocks of calls, or after each call (default: %(default)s)",
    )
    how.add_argument("--rounds", type=positive, default=5, help="blocks of each (default: %(default)s)")
    how.add_argument("--seconds", type=float, default=0.15, help="length of a block, about (default: %(default)s)")
    how.add_argument(
        "-c",
        "--check",
        action="store_true",
        help="check each result, bit for bit; #wrong counts elements, over all ranks",
    )
    instead = bench.add_argument_group("instead of the sweep over operations and sizes")
    instead.add_argument(
        "--machine",
        action="store_true",
        help="how this host's cores lie, and all_reduce, all_gather, all_to_all and barrier at 2 ranks to as many as "
        "cores (or as -r says), beside gloo and, where installed, raw MPI and DeepSpeed's op, on a page",
    )
    instead.add_argument(
        "--limit",
        type=positive,
        default=machine.LIMIT,
        metavar="SECONDS",
        help="--machine: what it may take in all (default: %(default)s)",
    )
    bench.add_argument("--json", metavar="FILE", help="also write the figures, and what they were measured on")
    bench.add_argument("--plot", metavar="FILE", help="also draw a picture; needs matplotlib")
    bench.set_defaults(run=lambda args: main(args, bench, rank))


def _why_not(args: Any) -> str | None:
    """Why these options cannot be, together or here; None if they can."""
    if args.ranks is not None and ranks.launched():
        return "-r starts ranks, and here the launcher has started them"
    if args.machine and ranks.launched():
        return "--machine starts ranks, and here a launcher has started some"
    if args.factor < 2 or (args.ranks is not None and args.ranks < 2):
        return "needs at least 2 ranks, and a factor of at least 2"
    if not args.begin <= args.end:
        return "-b is larger than -e"
    if args.ratio_to not in (None, "custom", *args.against):
        return f"--ratio-to {args.ratio_to}: not timed; it is of custom, {', '.join(args.against)}"
    if any(o in REDUCING for o in args.operations) and args.redop not in dtypes.BY_DTYPE[args.dtype].reduces:
        return f"{args.redop.lower()} has no meaning for {name_of(args.dtype)}"
    if any(o in ROOTED for o in args.operations) and not 0 <= args.root < ranks.count(args.ranks or 2):
        return f"--root {args.root}: no such rank"
    for file in (args.json, args.plot):
        if file and not os.access(os.path.dirname(os.path.abspath(file)), os.W_OK):
            return f"cannot write {file}"
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot draws with matplotlib: pip install matplotlib"
    return None


def _sizes(args: Any) -> Iterator[int]:
    size = args.begin
    while size <= args.end:
        yield size
        size *= args.factor


def main(args: Any, parser: argparse.ArgumentParser, rank: Callable[[sweep.Sweep], object]) -> int:
    """The command's exit status: 0, or 1 where ranks failed or a check found wrong elements. Starts the ranks, or is
    one of them under a launcher. ``parser``: refuses what makes no sense, and exits with 2."""
    if why := _why_not(args):
        # Every process of a launched job is refused alike; one says it.
        parser.error(why) if not ranks.launched() or ranks.is_first() else parser.exit(2)
    if args.machine:
        return machine.main(machine.Machine(args.limit, args.ranks, args.json, args.plot))
    args.against = args.threads or args.against
    plan = Plan(args.alternate == "call", args.rounds, args.seconds, args.calls, args.warmup, args.average)
    given = {**vars(args), "sizes": tuple(_sizes(args)), "plan": plan}
    todo = sweep.Sweep(**{field.name: given[field.name] for field in fields(sweep.Sweep)})
    return ranks.run(rank, args.ranks or 2, todo)
