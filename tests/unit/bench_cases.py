"""Arguments and cases of the benchmark, for its tests."""

import argparse

import torch

from c10d_custom.bench import command
from c10d_custom.bench.case import REDUCING, ROOTED, Case


def parsed(*argv):
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers(required=True))
    return parser.parse_args(argv)


def case(name, rank, size, count=30):
    return Case(
        name, count, torch.float32, "SUM" if name in REDUCING else None, 1 if name in ROOTED else -1, False, rank, size
    )
