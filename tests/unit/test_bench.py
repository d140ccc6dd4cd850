"""The benchmark runs every operation, checks it and prints a table; its figures are nobody's business here."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from c10d_custom import dtypes
from c10d_custom.bench import picture, ranks
from c10d_custom.bench.case import REDUCING, ROOTED
from c10d_custom.bench.operations import OPERATIONS
from c10d_custom.bench.values import Values, differing
from unit.bench_cases import BENCH, COLUMNS, MPIEXEC, QUICK, bench, case, mpi, parsed, rows, run

pytestmark = pytest.mark.lane3


def mpirun(size, *options):
    """bench under mpirun; the rendezvous is given, by MPI's own ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    rank = (
        "RANK=${PMI_RANK:-$OMPI_COMM_WORLD_RANK} WORLD_SIZE=${PMI_SIZE:-$OMPI_COMM_WORLD_SIZE} "
        f'MASTER_ADDR=127.0.0.1 MASTER_PORT={port} exec "$@"'
    )
    return run(
        [MPIEXEC, "-n", str(size), "sh", "-c", rank, "sh", *BENCH, *options],
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_mpi_yield_when_idle="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    )


def test_every_operation_is_timed_and_checked_beside_every_reference(tmp_path):
    out = bench(
        "all",
        "-r",
        "3",
        "-b",
        "1",
        "-e",
        "64K",
        "-f",
        "65536",
        "-c",
        "--root",
        "1",
        "--against",
        "gloo,noop,floor",
        "--ratio-to",
        "floor",
        "--json",
        str(tmp_path / "run.json"),
        *QUICK,
    )
    assert out.returncode == 0, out.stderr
    assert re.findall(r"^(\w+), 3 ranks", out.stdout, re.M) == list(OPERATIONS)
    assert all(re.search(rf"\b{re.escape(column)}\b|{column}", out.stdout) for column in [*COLUMNS, "x floor"])
    table = rows(out.stdout)
    assert len(table) == len(OPERATIONS) * 2 * 4
    whole, cut = {"4", "65536"}, {"12", "65532"}  # three equal parts
    assert {row["size"] for row in table} == whole | cut
    for row in table:
        assert row["#wrong"] == ("0" if row["backend"] in ("custom", "gloo") else "-")
        assert float(row["min us"]) <= float(row["time us"]) <= float(row["p99 us"]) or row["p99 us"] == row["time us"]
        assert (row["algbw"] == "-") == (row["backend"] == "noop")
        assert (row["busbw"] == "-") == (row["backend"] in ("noop", "floor"))
        assert int(row["size"]) == 4 * int(row["count"])
        assert row["ratio"] == "1.00" or row["backend"] != "floor"
    written = json.loads((tmp_path / "run.json").read_text())
    assert (
        written["ranks"] == 3
        and [h["ranks"] for h in written["hosts"]] == [3]
        and written["torch"] == torch.__version__
    )
    assert {"cpu", "caches", "kernel", "load_after", "settings", "argv"} <= written.keys()
    assert {(r["operation"], r["redop"], r["root"]) for r in written["results"]} == {
        (o, "SUM" if o in REDUCING else None, 1 if o in ROOTED else -1) for o in OPERATIONS
    }


def test_windows_are_timed_and_checked_beside_bare_stores():
    out = bench("windows", "-b", "4", "-e", "64K", "-f", "16384", "-c", "--against", "store,gloo", *QUICK)
    assert out.returncode == 0, out.stderr
    assert "gloo is not timed: it has no windows of CPU tensors" in out.stdout
    table = rows(out.stdout)
    assert [(row["size"], row["backend"], row["#wrong"]) for row in table] == [
        (size, name, "0") for size in ("4", "65536") for name in ("custom", "store")
    ]


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is matplotlib's")
    results = [
        {
            "operation": o,
            "bytes": b,
            "reference": n,
            "min_us": 1.0,
            "median_us": 2.0,
            "p99_us": 3.0,
            "busbw": None if n == "noop" else 4.0,
        }
        for o in ("all_reduce", "gather")
        for b in (4, 1024)
        for n in ("custom", "gloo", "noop", "another")
    ]
    picture.draw(tmp_path / "run.png", "two ranks", results)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@mpi
def test_under_mpirun_raw_mpi_is_timed_beside_us(tmp_path):
    out = mpirun(
        3,
        "all",
        "-b",
        "4",
        "-e",
        "64K",
        "-f",
        "16384",
        "-c",
        "--against",
        "mpi",
        "--root",
        "2",
        "--json",
        str(tmp_path / "run.json"),
        *QUICK,
    )
    assert out.returncode == 0, out.stderr
    assert re.findall(r"^(\w+), 3 ranks", out.stdout, re.M) == list(OPERATIONS)  # rank 0 alone prints
    table = rows(out.stdout)
    assert len(table) == len(OPERATIONS) * 2 * 2 and {row["#wrong"] for row in table} == {"0"}
    written = json.loads((tmp_path / "run.json").read_text())
    assert re.match(r"(MPICH|Open MPI|Intel MPI) \d", written["mpi"])
    assert {(r["operation"], r["reference"]) for r in written["results"]} == {
        (o, n) for o in OPERATIONS for n in ("custom", "mpi")
    }


def test_under_torchrun_each_process_is_a_rank_and_what_a_reference_refuses_is_said():
    out = run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "-m",
            "c10d_custom",
            "bench",
            "all_reduce,reduce_scatter",
            "-b",
            "1K",
            "-e",
            "1K",
            "-d",
            "int16",
            "-o",
            "max",
            "--async",
            "--alternate",
            "call",
            "-n",
            "3",
            "-w",
            "2",
            "-a",
            "max",
            "-c",
            "--busy",
            "1",
            "--against",
            "gloo,noop",
        ]
    )
    assert out.returncode == 0, out.stderr
    assert re.search(r"gloo is not timed: .*scalar type", out.stdout)
    table = rows(out.stdout)
    assert [(r["count"], r["type"], r["redop"], r["backend"], r["#wrong"]) for r in table] == [
        ("512", "int16", "max", "custom", "0"),
        ("512", "int16", "max", "noop", "-"),
    ] * 2


@pytest.mark.parametrize(
    "options, env, why",
    [
        (["all_redcue"], {}, "all_redcue"),
        (["--against", "glooo"], {}, "glooo"),
        (["--ratio-to", "mpi"], {}, "not timed"),
        (["--threads", "1,65"], {}, "at most 64"),
        (["-r", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "the launcher has started them"),
        (["broadcast", "--root", "2"], {}, "no such rank"),
        (["-d", "float31"], {}, "no such dtype"),
        (["-d", "quint8"], {}, "not a dtype of numbers"),
        (["-d", "float32", "-o", "band"], {}, "no meaning"),
        (["-o", "premul_sum"], {}, "no such reduction"),
        (["--json", "/no/such/folder/run.json"], {}, "cannot write"),
    ],
)
def test_what_cannot_run_is_refused_at_once(options, env, why, monkeypatch, capsys):
    for name in [n for n in os.environ if n.startswith(("PMI", "OMPI_COMM", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        args = parsed("bench", *options)
        args.run(args)
    assert end.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_element_is_counted(name):
    """What each operation must give, computed here from its inputs, and one element off."""
    size, root = 3, 1
    buffers = [OPERATIONS[name].make(case(name, rank, size)) for rank in range(size)]
    for b in buffers:
        b.fill()
    inputs = [None if b.source is None else b.source.clone() for b in buffers]
    assert len({tuple(i.tolist()) for i in inputs if i is not None}) == sum(i is not None for i in inputs)
    outputs = {
        "broadcast": lambda r: inputs[root],
        "all_gather": lambda r: torch.cat(inputs),
        "reduce_scatter": lambda r: sum(inputs).chunk(size)[r],
        "gather": lambda r: torch.cat(inputs),
        "all_to_all": lambda r: torch.cat([i.chunk(size)[r] for i in inputs]),
        "scatter": lambda r: inputs[root].chunk(size)[r],
        "send_recv": lambda r: inputs[0] if r == 2 else inputs[r],
    }.get(name, lambda r: sum(inputs))
    for r, b in enumerate(buffers):
        if b.target is None or (name == "reduce" and r != root):
            assert b.wrong() == 0
            continue
        b.target.copy_(outputs(r))
        assert b.wrong() == 0
        b.target[-1] += 1
        assert b.wrong() == 1


def number(x):
    return x.real if isinstance(x, complex) else x


FOLD = {
    "SUM": lambda a, b: a + b,
    "AVG": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": min,
    "MAX": max,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("dtype", [d for d in dtypes.BY_DTYPE if dtypes.BY_DTYPE[d].reduces], ids=str)
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_what_a_check_expects_is_exact(dtype, size):
    """Folded in Python's integers, with every partial result a value of the dtype."""

    def python(tensor):
        wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else tensor.dtype
        return [number(x) for x in tensor.to(wide).tolist()]

    count = 1100
    for redop in dtypes.BY_DTYPE[dtype].reduces:
        if redop == "PREMUL_SUM":  # not the benchmark's
            continue
        values = Values(dtype, redop, size)
        inputs = [python(values.of(r, count)) for r in range(size)]
        assert len(set(map(tuple, inputs))) > 1
        folded = inputs[0]
        for more in inputs[1:]:
            folded = [FOLD[redop](a, b) for a, b in zip(folded, more, strict=True)]
            if dtype is torch.bool:
                folded = [bool(x) for x in folded]
            if redop == "AVG" and dtype.is_floating_point and dtype.itemsize == 1:
                continue  # gloo has none of these, and ours adds in float32
            partial = torch.tensor(folded, dtype=torch.float64)
            assert torch.equal(partial, torch.tensor(python(partial.to(dtype)), dtype=torch.float64)), redop
        if redop == "AVG":
            assert all(x % size == 0 for x in folded)
            folded = [x // size for x in folded]
        assert python(values.reduced(count)) == folded, redop
        assert differing(values.reduced(100, 1000), values.reduced(count)[1000:]) == 0


def test_a_burner_ends_with_its_parent():
    with ranks.burning(2):
        pass  # returns: both are dead and reaped
    parent = (
        "import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1], "
        "str(os.getpid())], "
        "stdout=subprocess.DEVNULL).pid)"
    )
    out = subprocess.run([sys.executable, "-S", "-c", parent, ranks._BURN], text=True, capture_output=True, timeout=60)
    pid, until = int(out.stdout), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)


# The bar for speed
