"""``python -m c10d_custom bench``: the command line, the ranks, the table.

Every backend is timed in the same ranks, in one run, in alternating blocks, so that what else the
machine does hits all of them alike. Figures are medians over rank 0's calls; the load is printed,
because a busy machine changes them.
"""
import argparse
import os
import statistics
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .operations import OPERATIONS

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text):
    unit = _UNITS.get(text[-1:].upper(), 1)
    value = int(text[:-1] if unit > 1 else text) * unit
    if value < 4:
        raise argparse.ArgumentTypeError("sizes start at 4 bytes")
    return value


def _parser():
    parser = argparse.ArgumentParser(prog="python -m c10d_custom", description="Tools of c10d-custom.")
    bench = parser.add_subparsers(required=True, metavar="command").add_parser(
        "bench", help="time collectives beside another backend", description=__doc__.split("\n\n")[1])
    bench.add_argument("-o", "--operation", default="all_reduce", metavar="OP[,OP...]",
                       help=f"of {', '.join(OPERATIONS)}; all (default: %(default)s)")
    bench.add_argument("-r", "--ranks", type=int, default=2, help="processes to start (default: %(default)s)")
    bench.add_argument("-b", "--begin", type=_bytes, default=4, metavar="BYTES", help="smallest size (default: 4)")
    bench.add_argument("-e", "--end", type=_bytes, default=1 << 26, metavar="BYTES", help="largest size (default: 64M)")
    bench.add_argument("-f", "--factor", type=int, default=4, help="from one size to the next (default: %(default)s)")
    bench.add_argument("--against", default="gloo", help="the other backend (default: %(default)s)")
    bench.add_argument("--rounds", type=int, default=5, help="alternating blocks of calls (default: %(default)s)")
    bench.add_argument("--seconds", type=float, default=0.15,
                       help="length of a block, about (default: %(default)s)")
    return parser


def _calls(function, group, seconds, rank):
    """How many calls make a block of about ``seconds``: rank 0 decides for all."""
    function(group)
    dist.barrier(group)
    started = time.perf_counter()
    for _ in range(3):
        function(group)
    each = (time.perf_counter() - started) / 3
    count = torch.tensor([max(3, min(2000, int(seconds / max(each, 1e-7))))])
    dist.broadcast(count, group=group, group_src=0)
    return int(count)


def _times(function, groups, rounds, seconds, rank):
    """{backend: seconds of each of rank 0's calls}"""
    counts = {name: _calls(function, group, seconds, rank) for name, group in groups.items()}
    times = {name: [] for name in groups}
    for _ in range(rounds):
        for name, group in groups.items():
            function(group)
            dist.barrier(group)
            for _ in range(counts[name]):
                started = time.perf_counter()
                function(group)
                times[name].append(time.perf_counter() - started)
            dist.barrier(group)
    return times


def _rank_main(rank, args, port):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("custom", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks,
                            timeout=timedelta(seconds=120))
    groups = {"custom": dist.group.WORLD, args.against: dist.new_group(backend=args.against)}
    names = list(OPERATIONS) if args.operation == "all" else args.operation.split(",")
    for name in names:
        operation = OPERATIONS[name]
        if rank == 0:
            print(f"\n{name}, {args.ranks} ranks, float32; times are medians of rank 0\n"
                  f"{'bytes':>10} {'custom us':>11} {'p99':>9} {'busbw GB/s':>10} {args.against + ' us':>11} {'p99':>9} {'ratio':>7}")
        size = args.begin
        while size <= args.end:
            function = operation.make(max(1, size // 4), rank, args.ranks)
            times = _times(function, groups, args.rounds, args.seconds, rank)
            if rank == 0:
                ours, theirs = times["custom"], times[args.against]
                middle = statistics.median(ours)
                print(f"{size:>10} {middle * 1e6:>11.1f} {_p99(ours) * 1e6:>9.0f} "
                      f"{size / middle * operation.bus_factor(args.ranks) / 1e9:>10.2f} "
                      f"{statistics.median(theirs) * 1e6:>11.1f} {_p99(theirs) * 1e6:>9.0f} "
                      f"{statistics.median(theirs) / middle:>7.2f}", flush=True)
            size *= args.factor
    dist.destroy_process_group()


def _p99(values):
    return sorted(values)[int(len(values) * 0.99)]


def main(argv=None):
    args = _parser().parse_args(argv)
    unknown = set(args.operation.split(",")) - set(OPERATIONS) - {"all"}
    if unknown:
        _parser().error(f"no such operation: {', '.join(sorted(unknown))}")
    if args.ranks < 2 or args.factor < 2:
        _parser().error("needs at least 2 ranks, and a factor of at least 2")
    from torch.distributed.elastic.utils.distributed import get_free_port

    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, load {load:.1f} before")
    mp.spawn(_rank_main, (args, get_free_port()), nprocs=args.ranks)
    print(f"\nload {os.getloadavg()[0]:.1f} after")
    return 0
