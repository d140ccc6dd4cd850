"""The benchmark's command, arguments, cases and table, for its tests."""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from c10d_custom.bench import command
from c10d_custom.bench.case import REDUCING, ROOTED, Case

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
mpi = pytest.mark.skipif(
    not (MPIEXEC and importlib.util.find_spec("mpi4py")), reason="needs mpi4py and mpiexec: pip install mpi4py mpich"
)
BENCH = [sys.executable, "-m", "c10d_custom", "bench"]
OWN_BENCH = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "bench")]
QUICK = ["--rounds", "1", "--seconds", "0.001"]
COLUMNS = [
    "size",
    "count",
    "type",
    "redop",
    "root",
    "backend",
    "min us",
    "time us",
    "p99 us",
    "algbw",
    "busbw",
    "#wrong",
]


def run(command_, **env):
    # This suite may itself run under a launcher; what is started here does not.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "RANK", "WORLD_SIZE"))}
    return subprocess.run(command_, text=True, capture_output=True, timeout=200, env={**clean, **env})


def bench(*options, **env):
    return run([*BENCH, *options], **env)


def rows(text):
    """[{column: text}] of the tables in what was printed."""
    number = r" +(?:[\d.]+|-)"
    found = re.findall(rf"^ *\d+ +\d+ +\w+ +\w+ +-?\d+ +\w+{number * 7}$", text, re.M)
    return [dict(zip([*COLUMNS, "ratio"], line.split(), strict=True)) for line in found]


def parsed(*argv):
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers(required=True))
    return parser.parse_args(argv)


def case(name, rank, size, count=30):
    return Case(
        name, count, torch.float32, "SUM" if name in REDUCING else None, 1 if name in ROOTED else -1, False, rank, size
    )
