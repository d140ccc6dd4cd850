"""``python -m c10d_custom bench``: the command line, the timing, the table.

Everything is timed in the same ranks, in one run, in alternating blocks, so that what else the
machine does hits all alike. Figures are medians over rank 0's calls; the load is printed,
because a busy machine changes them.
"""
import argparse
import json
import os
import shlex
import statistics
import sys
import time
from datetime import datetime, timezone

import torch
import torch.distributed as dist

from .._version import __version__
from . import ranks, references
from .operations import OPERATIONS

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Settings that change figures, recorded with them.
_SETTINGS = ("C10D_CUSTOM_", "OMPI_MCA_", "MPIR_CVAR_", "UCX_", "FI_", "GLOO_", "OMP_NUM_THREADS")


def size_in_bytes(text):
    unit = _UNITS.get(text[-1:].upper(), 1)
    value = int(text[:-1] if unit > 1 else text) * unit
    if value < 4:
        raise argparse.ArgumentTypeError("sizes start at 4 bytes")
    return value


def _names(text):
    names = list(dict.fromkeys(text.split(",")))
    if "custom" in names or "" in names:
        raise argparse.ArgumentTypeError("names other backends, or mpi; custom is always timed")
    if unknown := [name for name in names if not references.known(name)]:
        raise argparse.ArgumentTypeError(f"no such backend: {', '.join(unknown)}")
    return names


def _operations(text):
    names = list(OPERATIONS) if text == "all" else text.split(",")
    if unknown := sorted(set(names) - set(OPERATIONS)):
        raise argparse.ArgumentTypeError(f"no such operation: {', '.join(unknown)}")
    return names


def add_to(commands):
    bench = commands.add_parser(
        "bench", help="time collectives beside other backends and raw MPI", description=__doc__.split("\n\n")[1],
        epilog="Starts its ranks itself; under torchrun or mpirun, each process is one rank: "
               "mpirun -n 4 python -m c10d_custom bench --against gloo,mpi")
    bench.add_argument("-o", "--operation", type=_operations, default="all_reduce", metavar="OP[,OP...]",
                       help=f"of {', '.join(OPERATIONS)}; all (default: %(default)s)")
    bench.add_argument("-r", "--ranks", type=int, help="processes to start (default: 2)")
    bench.add_argument("-b", "--begin", type=size_in_bytes, default=4, metavar="BYTES", help="smallest size (default: 4)")
    bench.add_argument("-e", "--end", type=size_in_bytes, default=1 << 26, metavar="BYTES",
                       help="largest size (default: 64M)")
    bench.add_argument("-f", "--factor", type=int, default=4, help="from one size to the next (default: %(default)s)")
    bench.add_argument("--against", type=_names, default="gloo", metavar="NAME[,NAME...]",
                       help="other backends; mpi: raw MPI by mpi4py, under mpirun only (default: %(default)s)")
    bench.add_argument("-c", "--check", action="store_true",
                       help="check each operation's result at each size; #wrong counts elements, over all ranks")
    bench.add_argument("--rounds", type=int, default=5, help="alternating blocks of calls (default: %(default)s)")
    bench.add_argument("--seconds", type=float, default=0.15,
                       help="length of a block, about (default: %(default)s)")
    bench.add_argument("--json", metavar="FILE", help="also write the figures, and what they were measured on")
    bench.set_defaults(run=lambda args: main(args, bench))


def _wrong(function, buffers, tally, key):
    """Wrong elements over all ranks after one call; rank 0's answer counts. Summed in the Store ``tally``, by
    none of those being checked."""
    buffers.fill()
    function()
    tally.add(key, buffers.wrong())
    tally.add(f"{key} ranks", 1)
    buffers.clear()
    while dist.get_rank() == 0 and tally.add(f"{key} ranks", 0) < dist.get_world_size():
        time.sleep(0.001)
    return tally.add(key, 0)


def _calls(function, barrier, seconds):
    """How many calls make a block of about ``seconds``: rank 0 decides for all."""
    function()
    barrier()
    started = time.perf_counter()
    for _ in range(3):
        function()
    each = (time.perf_counter() - started) / 3
    count = torch.tensor([max(3, min(2000, int(seconds / max(each, 1e-7))))])
    dist.broadcast(count, src=0)
    return int(count)


def _times(functions, barriers, rounds, seconds):
    """{reference: seconds of each of rank 0's calls}"""
    counts = {name: _calls(function, barriers[name], seconds) for name, function in functions.items()}
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            function()
            barriers[name]()
            for _ in range(counts[name]):
                started = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - started)
            barriers[name]()
    return times


def _result(operation, size, reference, times, ranks_, wrong):
    times, middle = sorted(times), statistics.median(times)
    return {"operation": operation, "bytes": size, "reference": reference, "calls": len(times),
            "min_us": times[0] * 1e6, "median_us": middle * 1e6, "p99_us": times[int(len(times) * 0.99)] * 1e6,
            "busbw": size / middle * OPERATIONS[operation].bus_factor(ranks_) / 1e9, "wrong": wrong}


def _head(names, check):
    wrong = f" {'#wrong':>7}" if check else ""
    return f"{'bytes':>10} {'custom us':>11} {'p99':>9} {'busbw GB/s':>10}{wrong}" + "".join(
        f" {name + ' us':>11} {'p99':>9} {'ratio':>7}{wrong}" for name in names)


def _row(results):
    """One size's results, ours first."""
    def wrong(result):
        return "" if result["wrong"] is None else f" {result['wrong']:>7}"

    ours, *others = results
    text = f"{ours['bytes']:>10} {ours['median_us']:>11.1f} {ours['p99_us']:>9.0f} {ours['busbw']:>10.2f}" + wrong(ours)
    for other in others:
        text += (f" {other['median_us']:>11.1f} {other['p99_us']:>9.0f} "
                 f"{other['median_us'] / ours['median_us']:>7.2f}{wrong(other)}")
    return text


def _place(hosts):
    cores = sorted({h["cores"] for h in hosts})
    text = f"{'/'.join(map(str, cores))} cores, load {'/'.join(format(h['load'], '.1f') for h in hosts)} before"
    if len(hosts) > 1:
        text += "; " + ", ".join(f"{h['name']}: {h['ranks']} ranks" for h in hosts)
    return text


def _rank_main(args, command):
    """One rank's whole run; true where a check found wrong elements."""
    hosts, rank, size = ranks.hosts(), dist.get_rank(), dist.get_world_size()
    try:
        timed = references.make(args.against, len(hosts))
    except references.Unavailable as error:
        raise SystemExit(f"bench: {error}") from None
    mpi = references.mpi_version()
    about = {"torch": torch.__version__, "c10d_custom": __version__, "mpi": mpi, "ranks": size, "hosts": hosts,
             "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": command,
             "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)}}
    say = print if rank == 0 else lambda *text, **how: None
    say(f"torch {torch.__version__}, {mpi + ', ' if mpi else ''}{_place(hosts)}")
    # Only the sums of --check go through it, and c10d gives it by this name alone.
    tally = dist.PrefixStore("bench", dist.distributed_c10d._get_default_store())
    results = []
    for name in args.operation:
        say(f"\n{name}, {size} ranks, float32; times are medians of rank 0\n{_head(args.against, args.check)}")
        nbytes = args.begin
        while nbytes <= args.end:
            buffers = OPERATIONS[name].make(max(1, nbytes // 4), rank, size)
            functions = {n: getattr(r, name)(buffers.source, buffers.target) for n, r in timed.items()}
            wrong = {n: _wrong(f, buffers, tally, f"{name} {nbytes} {n}") if args.check else None
                     for n, f in functions.items()}
            times = _times(functions, {n: r.barrier for n, r in timed.items()}, args.rounds, args.seconds)
            if rank == 0:
                results += [_result(name, nbytes, n, t, size, wrong[n]) for n, t in times.items()]
                say(_row(results[-len(timed):]), flush=True)
            nbytes *= args.factor
    about["load_after"] = [h["load"] for h in ranks.hosts()]
    say(f"\nload {'/'.join(format(load, '.1f') for load in about['load_after'])} after")
    if args.json and rank == 0:
        with open(args.json, "w") as f:
            json.dump({**about, "results": results}, f, indent=1)
    return any(r["wrong"] for r in results)


def main(args, parser):
    def refuse(why):
        # Every process of a launched job is refused alike; one says it.
        parser.error(why) if not ranks.launched() or ranks.is_first() else parser.exit(2)

    if args.ranks is not None and ranks.launched():
        refuse("-r starts ranks, and here the launcher has started them")
    if args.factor < 2 or (args.ranks is not None and args.ranks < 2):
        refuse("needs at least 2 ranks, and a factor of at least 2")
    if "mpi" in args.against and not ranks.under_mpi():
        refuse("--against mpi times raw MPI, so its ranks must be mpirun's: "
               "mpirun -n 2 python -m c10d_custom bench --against mpi")
    if args.json and not os.access(os.path.dirname(os.path.abspath(args.json)), os.W_OK):
        refuse(f"cannot write {args.json}")
    command = shlex.join(["python", "-m", "c10d_custom", *sys.argv[1:]])
    return ranks.run(_rank_main, args.ranks or 2, args, command)
