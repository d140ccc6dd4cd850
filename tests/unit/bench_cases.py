"""Runs, arguments and cases of the benchmark, for its tests."""

import argparse
import os
import subprocess
import sys

import torch

from c10d_custom.bench import command
from c10d_custom.bench.case import REDUCING, ROOTED, Case

BENCH = [sys.executable, "-m", "c10d_custom", "bench"]
QUICK = ["--rounds", "1", "--seconds", "0.001"]


def run(command_, **env):
    # This suite may itself run under a launcher; what is started here does not.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "RANK", "WORLD_SIZE"))}
    return subprocess.run(command_, text=True, capture_output=True, timeout=200, env={**clean, **env})


def bench(*options, **env):
    return run([*BENCH, *options], **env)


def parsed(*argv):
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers(required=True))
    return parser.parse_args(argv)


def case(name, rank, size, count=30):
    return Case(
        name, count, torch.float32, "SUM" if name in REDUCING else None, 1 if name in ROOTED else -1, False, rank, size
    )
