"""The benchmark runs every operation and prints a table; its figures are nobody's business here."""
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from c10d_custom.bench.operations import OPERATIONS

BENCH = [sys.executable, "-m", "c10d_custom", "bench"]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
mpi = pytest.mark.skipif(not (MPIEXEC and importlib.util.find_spec("mpi4py")), reason="needs mpi4py and mpiexec: pip install mpi4py mpich")
QUICK = ["--rounds", "1", "--seconds", "0.001"]


def run(command, **env):
    # This suite may itself run under a launcher; what is started here does not.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "RANK", "WORLD_SIZE"))}
    return subprocess.run(command, text=True, capture_output=True, timeout=200, env={**clean, **env})


def bench(*options, **env):
    return run([*BENCH, *options], **env)


def mpirun(ranks, *options):
    """bench under mpirun; the rendezvous is given, by MPI's own ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    rank = ('RANK=${PMI_RANK:-$OMPI_COMM_WORLD_RANK} WORLD_SIZE=${PMI_SIZE:-$OMPI_COMM_WORLD_SIZE} '
            f'MASTER_ADDR=127.0.0.1 MASTER_PORT={port} exec "$@"')
    return run([MPIEXEC, "-n", str(ranks), "sh", "-c", rank, "sh", *BENCH, *options],
               OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1",
               PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe")


def rows(text, columns):
    return [line.split() for line in text.splitlines() if re.fullmatch(rf" +(\d+)(?: +[\d.]+){{{columns - 1}}}", line)]


def test_every_operation_is_timed_and_checked_at_every_size():
    out = bench("-o", "all", "-r", "3", "-b", "4", "-e", "64K", "-f", "16384", "-c", *QUICK)
    assert out.returncode == 0, out.stderr
    assert re.findall(r"^(\w+), 3 ranks", out.stdout, re.M) == list(OPERATIONS)
    table = rows(out.stdout, 9)
    assert [row[0] for row in table] == ["4", "65536"] * len(OPERATIONS)
    assert {(row[4], row[8]) for row in table} == {("0", "0")}  # wrong elements: ours, gloo's


def test_the_table_without_a_check():
    out = bench("-e", "4", *QUICK)
    assert out.returncode == 0 and [row[0] for row in rows(out.stdout, 7)] == ["4"], out.stderr


@mpi
def test_under_mpirun_raw_mpi_is_timed_beside_us(tmp_path):
    out = mpirun(3, "-o", "all", "-b", "4", "-e", "64K", "-f", "16384", "-c", "--against", "gloo,mpi",
                 "--json", str(tmp_path / "run.json"), *QUICK)
    assert out.returncode == 0, out.stderr
    assert re.findall(r"^(\w+), 3 ranks", out.stdout, re.M) == list(OPERATIONS)  # rank 0 alone prints
    table = rows(out.stdout, 13)
    assert [row[0] for row in table] == ["4", "65536"] * len(OPERATIONS)
    assert {(row[4], row[8], row[12]) for row in table} == {("0", "0", "0")}
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["ranks"] == 3 and [h["ranks"] for h in run["hosts"]] == [3] and run["torch"] == torch.__version__
    assert re.match(r"(MPICH|Open MPI|Intel MPI) \d", run["mpi"])
    assert {(r["operation"], r["bytes"], r["reference"]) for r in run["results"]} == {
        (o, b, n) for o in OPERATIONS for b in (4, 65536) for n in ("custom", "gloo", "mpi")}


def test_under_torchrun_each_process_is_a_rank():
    out = run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "c10d_custom", "bench",
               "-e", "4", *QUICK])
    assert out.returncode == 0 and len(rows(out.stdout, 7)) == 1, out.stderr


@pytest.mark.parametrize("options, env, why", [
    (["-o", "all_redcue"], {}, "all_redcue"),
    (["--against", "glooo"], {}, "glooo"),
    (["--against", "mpi"], {}, "mpirun"),
    (["-r", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "the launcher has started them"),
    (["--json", "/no/such/folder/run.json"], {}, "cannot write"),
])
def test_what_cannot_run_is_refused_at_once(options, env, why):
    out = bench(*options, **env)
    assert out.returncode == 2 and why in out.stderr


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_element_is_counted(name):
    """What each operation must give, computed here from its inputs, and one element off."""
    size, count = 3, 30
    buffers = [OPERATIONS[name].make(count, rank, size) for rank in range(size)]
    for b in buffers:
        b.fill()
    inputs = [None if b.source is None else b.source.clone() for b in buffers]
    outputs = {"broadcast": lambda r: inputs[0], "reduce": lambda r: sum(inputs), "all_gather": lambda r: torch.cat(inputs),
               "reduce_scatter": lambda r: sum(inputs).chunk(size)[r], "gather": lambda r: torch.cat(inputs),
               "all_to_all": lambda r: torch.cat([i.chunk(size)[r] for i in inputs]),
               "scatter": lambda r: inputs[0].chunk(size)[r],
               "send_recv": lambda r: inputs[0] if r == 2 else inputs[r]}.get(name, lambda r: sum(inputs))
    for r, b in enumerate(buffers):
        if b.target is None or (name == "reduce" and r):
            continue
        b.target.copy_(outputs(r))
        assert b.wrong() == 0
        b.target[-1] += 1
        assert b.wrong() == 1
