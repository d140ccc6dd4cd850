"""The options of scripts/demo, read with nothing installed. Run by itself it checks them, or shows them."""

from __future__ import annotations

import argparse
from pathlib import Path

_ABOUT = """Trains a small network with DistributedDataParallel, shows that it learns what one process would learn, and
what communication costs beside gloo."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=_ABOUT)
    parser.add_argument("--ranks", type=int, default=2, help="processes to train with (default: %(default)s)")
    parser.add_argument("--mpi", action="store_true", help="start the ranks with mpiexec")
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        help="with --mpi or --torchrun: emulate so many hosts on this machine, which needs root (default: %(default)s)",
    )
    parser.add_argument(
        "--torchrun", action="store_true", help="with --hosts: start the ranks with torchrun on each host"
    )
    parser.add_argument("--backend", default="custom", help="of the distributed run (default: %(default)s)")
    parser.add_argument("--epochs", type=int, help="default: 20, or 2 with --mnist")
    parser.add_argument(
        "--mnist",
        type=Path,
        metavar="DIR",
        help="train on the MNIST files in DIR (train-images-idx3-ubyte[.gz], ...), "
        "not on the 1,797 digits that come with scikit-learn",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for the picture (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="few epochs, short timing: does it run at all?")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be at least 2")
    if not 1 <= args.hosts <= min(args.ranks, 8):
        parser.error("--hosts must be at least 1, at most 8, and at most --ranks")
    if args.hosts > 1 and not (args.mpi or args.torchrun):
        parser.error("--hosts needs --mpi or --torchrun")
    if args.mpi and args.torchrun:
        parser.error("--mpi and --torchrun: one of them")
    if args.epochs is None:
        args.epochs = (1 if args.mnist else 3) if args.quick else (2 if args.mnist else 20)
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    return args


if __name__ == "__main__":
    parse_args()
