"""The benchmark runs every operation, checks it and prints a table; its figures are nobody's business here."""
import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from c10d_custom import dtypes
from c10d_custom.bench import bar, busy, command, cost_check, parts, ranks, sweep_picture
from c10d_custom.bench.case import REDUCING, ROOTED, Case
from c10d_custom.bench.cost import cost
from c10d_custom.bench.operations import OPERATIONS
from c10d_custom.bench.parts import Part
from c10d_custom.bench.values import Values, differing

BENCH = [sys.executable, "-m", "c10d_custom", "bench"]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
mpi = pytest.mark.skipif(not (MPIEXEC and importlib.util.find_spec("mpi4py")), reason="needs mpi4py and mpiexec: pip install mpi4py mpich")
QUICK = ["--rounds", "1", "--seconds", "0.001"]
COLUMNS = ["size", "count", "type", "redop", "root", "backend", "min us", "time us", "p99 us", "algbw", "busbw", "#wrong"]


def run(command_, **env):
    # This suite may itself run under a launcher; what is started here does not.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "RANK", "WORLD_SIZE"))}
    return subprocess.run(command_, text=True, capture_output=True, timeout=200, env={**clean, **env})


def bench(*options, **env):
    return run([*BENCH, *options], **env)


def mpirun(size, *options):
    """bench under mpirun; the rendezvous is given, by MPI's own ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    rank = ('RANK=${PMI_RANK:-$OMPI_COMM_WORLD_RANK} WORLD_SIZE=${PMI_SIZE:-$OMPI_COMM_WORLD_SIZE} '
            f'MASTER_ADDR=127.0.0.1 MASTER_PORT={port} exec "$@"')
    return run([MPIEXEC, "-n", str(size), "sh", "-c", rank, "sh", *BENCH, *options],
               OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1",
               PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe")


def rows(text):
    """[{column: text}] of the tables in what was printed."""
    number = r" +(?:[\d.]+|-)"
    found = re.findall(rf"^ *\d+ +\d+ +\w+ +\w+ +-?\d+ +\w+{number * 7}$", text, re.M)
    return [dict(zip([*COLUMNS, "ratio"], line.split(), strict=True)) for line in found]


def test_every_operation_is_timed_and_checked_beside_every_reference(tmp_path):
    out = bench("all", "-r", "3", "-b", "1", "-e", "64K", "-f", "65536", "-c", "--root", "1", "--against", "gloo,noop,floor",
                "--ratio-to", "floor", "--json", str(tmp_path / "run.json"), *QUICK)
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
    assert written["ranks"] == 3 and [h["ranks"] for h in written["hosts"]] == [3] and written["torch"] == torch.__version__
    assert {"cpu", "caches", "kernel", "load_after", "settings", "argv"} <= written.keys()
    assert {(r["operation"], r["redop"], r["root"]) for r in written["results"]} == {
        (o, "SUM" if o in REDUCING else None, 1 if o in ROOTED else -1) for o in OPERATIONS}


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is matplotlib's")
    results = [{"operation": o, "bytes": b, "reference": n, "min_us": 1.0, "median_us": 2.0, "p99_us": 3.0, "busbw": None if n == "noop" else 4.0}
               for o in ("all_reduce", "gather") for b in (4, 1024) for n in ("custom", "gloo", "noop", "another")]
    sweep_picture.draw(tmp_path / "run.png", "two ranks", results)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@mpi
def test_under_mpirun_raw_mpi_is_timed_beside_us(tmp_path):
    out = mpirun(3, "all", "-b", "4", "-e", "64K", "-f", "16384", "-c", "--against", "mpi", "--root", "2",
                 "--json", str(tmp_path / "run.json"), *QUICK)
    assert out.returncode == 0, out.stderr
    assert re.findall(r"^(\w+), 3 ranks", out.stdout, re.M) == list(OPERATIONS)  # rank 0 alone prints
    table = rows(out.stdout)
    assert len(table) == len(OPERATIONS) * 2 * 2 and {row["#wrong"] for row in table} == {"0"}
    written = json.loads((tmp_path / "run.json").read_text())
    assert re.match(r"(MPICH|Open MPI|Intel MPI) \d", written["mpi"])
    assert {(r["operation"], r["reference"]) for r in written["results"]} == {
        (o, n) for o in OPERATIONS for n in ("custom", "mpi")}


def test_under_torchrun_each_process_is_a_rank_and_what_a_reference_refuses_is_said():
    out = run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "c10d_custom", "bench",
               "all_reduce,reduce_scatter", "-b", "1K", "-e", "1K", "-d", "int16", "-o", "max", "--async", "--alternate", "call",
               "-n", "3", "-w", "2", "-a", "max", "-c", "--busy", "1", "--against", "gloo,noop"])
    assert out.returncode == 0, out.stderr
    assert re.search(r"gloo is not timed: .*scalar type", out.stdout)
    table = rows(out.stdout)
    assert [(r["count"], r["type"], r["redop"], r["backend"], r["#wrong"]) for r in table] == [
        ("512", "int16", "max", "custom", "0"), ("512", "int16", "max", "noop", "-")] * 2


def test_ddp_steps_are_timed_for_each_backend(tmp_path):
    out = bench("--ddp", "8x2", "--json", str(tmp_path / "ddp.json"), *QUICK)
    assert out.returncode == 0, out.stderr
    written = json.loads((tmp_path / "ddp.json").read_text())["ddp"]
    assert [(r["model"], r["parameters"], r["reference"]) for r in written] == [
        ("8x2", 144, "custom"), ("8x2", 144, "gloo")]
    assert all(r["comm"] == max(r["step"] - r["local"], 0) for r in written)


@pytest.mark.parametrize("options, env, why", [
    (["all_redcue"], {}, "all_redcue"),
    (["--against", "glooo"], {}, "glooo"),
    (["--against", "mpi"], {}, "mpirun"),
    (["--ratio-to", "mpi"], {}, "not timed"),
    (["-r", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "the launcher has started them"),
    (["--bar"], {"RANK": "0", "WORLD_SIZE": "2"}, "not under torchrun"),
    (["broadcast", "--root", "2"], {}, "no such rank"),
    (["-d", "float31"], {}, "no such dtype"),
    (["-d", "quint8"], {}, "not a dtype of numbers"),
    (["-d", "float32", "-o", "band"], {}, "no meaning"),
    (["-o", "premul_sum"], {}, "no such reduction"),
    (["--ddp", "1024"], {}, "WIDTHxLAYERS"),
    (["--json", "/no/such/folder/run.json"], {}, "cannot write"),
])
def test_what_cannot_run_is_refused_at_once(options, env, why, monkeypatch, capsys):
    for name in [n for n in os.environ if n.startswith(("PMI", "OMPI_COMM", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        args = parsed("bench", *options)
        args.run(args)
    assert end.value.code == 2 and why in capsys.readouterr().err


def parsed(*argv):
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers(required=True))
    return parser.parse_args(argv)


def case(name, rank, size, count=30):
    return Case(name, count, torch.float32, "SUM" if name in REDUCING else None, 1 if name in ROOTED else -1, False, rank, size)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_element_is_counted(name):
    """What each operation must give, computed here from its inputs, and one element off."""
    size, root = 3, 1
    buffers = [OPERATIONS[name].make(case(name, rank, size)) for rank in range(size)]
    for b in buffers:
        b.fill()
    inputs = [None if b.source is None else b.source.clone() for b in buffers]
    assert len({tuple(i.tolist()) for i in inputs if i is not None}) == sum(i is not None for i in inputs)
    outputs = {"broadcast": lambda r: inputs[root], "all_gather": lambda r: torch.cat(inputs),
               "reduce_scatter": lambda r: sum(inputs).chunk(size)[r], "gather": lambda r: torch.cat(inputs),
               "all_to_all": lambda r: torch.cat([i.chunk(size)[r] for i in inputs]),
               "scatter": lambda r: inputs[root].chunk(size)[r],
               "send_recv": lambda r: inputs[0] if r == 2 else inputs[r]}.get(name, lambda r: sum(inputs))
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


FOLD = {"SUM": lambda a, b: a + b, "AVG": lambda a, b: a + b, "PRODUCT": lambda a, b: a * b, "MIN": min, "MAX": max,
        "BAND": lambda a, b: a & b, "BOR": lambda a, b: a | b, "BXOR": lambda a, b: a ^ b}


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
    with busy.burning(2):
        pass  # returns: both are dead and reaped
    parent = ("import os, subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1], str(os.getpid())], "
              "stdout=subprocess.DEVNULL).pid)")
    out = subprocess.run([sys.executable, "-S", "-c", parent, busy._BURN], text=True, capture_output=True, timeout=60)
    pid, until = int(out.stdout), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)


# The bar for speed

def fake_runs(ours=1.0):
    """What each part would write, if every call took us ``ours`` us and the others as in ``theirs``."""
    theirs = {"custom": ours, "gloo": 30.0, "mpi": 2.0, "floor": 1.0, "noop": 0.5}
    runs = {}
    for part in bar.plan(busy=0):
        args = parsed("bench", *part.options)
        if args.ddp:
            runs[part.name] = {"ddp": [{"model": "1024x6", "reference": "custom", "comm": ours},
                                       {"model": "1024x6", "reference": "gloo", "comm": 4.0}]}
            continue
        runs[part.name] = {"ranks": args.ranks or part.mpi_ranks, "results": [
            {"operation": o, "bytes": s, "reference": n, "median_us": theirs[n]}
            for o in args.operation for s in command._sizes(args) for n in ("custom", *args.against)]}
    return runs


def test_the_bar_takes_the_worst_of_each_row(capsys, tmp_path):
    def met(runs):
        file = tmp_path / "bar.json"
        assert bar.main(0, str(file), run=lambda part: (runs[part.name], None)) == 0
        return [(r["met"], r["figure"]) for r in json.loads(file.read_text())["rows"]]

    good = met(fake_runs())
    assert [m for m, _ in good] == [True] * len(bar.ROWS)
    assert [f for _, f in good] == [30, 30, 30, 2, 1, 0.5, 30, 0.25, 30]
    assert [m for m, _ in met(fake_runs(ours=20.0))] == [False] * 6 + [True, False, False]
    one_slow = fake_runs()
    slow = next(r for r in one_slow["8 ranks"]["results"] if r["operation"] == "scatter" and r["reference"] == "custom")
    slow["median_us"] = 100.0
    capsys.readouterr()
    assert [m for m, _ in met(one_slow)] == [True] * 8 + [False]
    out = capsys.readouterr().out
    assert re.search(r"every operation and size.*>= 2 x +0.3 x +30 +MISSED +scatter 4, 8 ranks; 89 of 90", out)


def test_a_row_whose_part_failed_is_not_measured(capsys):
    runs = fake_runs()
    assert bar.main(0, None, run=lambda part: (None, "no MPI") if part.mpi_ranks else (runs[part.name], None)) == 1
    assert re.search(r"raw MPI .*not measured: no MPI", capsys.readouterr().out)


def test_parts_are_commands_that_bench_takes():
    for part in (*bar.plan(busy=1), *cost_check.plan(busy=1)):
        assert parsed("bench", *part.options).busy == 1
        assert part.text().startswith("mpiexec -n 2 python" if part.mpi_ranks else "python -m c10d_custom bench ")


def test_a_part_that_fails_says_why(monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho so far so good; echo 'it broke' >&2; exit 3\n")
    fake.chmod(0o700)
    monkeypatch.setattr(parts.sys, "executable", str(fake))
    assert parts.run(Part("broken", ("all_reduce",))) == (None, "it broke")
    fake.write_text("#!/bin/sh\nfor last; do :; done; echo '{\"ranks\": 2}' > $last\n")
    assert parts.run(Part("whole", ("all_reduce",))) == ({"ranks": 2}, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "mpiexec" in parts.run(Part("no mpi", ("all_reduce",), mpi_ranks=2))[1]


# The cost model

ELSEWHERE = ("send_recv", "all_to_all")  # not in blocks through rings, but in cells, and in pieces of lanes
SIZES = (8, 4096, 16 << 10, 60000, 200000, 1 << 20, 3000000)


def _count_blocks(file):
    """Rank 0 writes how many blocks one call of each operation and size passes through the rings, of three ranks and of two."""
    from c10d_custom.bench import references
    from c10d_custom import native

    counted = []
    for group, size in ((dist.group.WORLD, 3), (dist.new_group([0, 1]), 2)):
        if dist.get_rank() >= size:
            continue
        reference, handle, state = references.Backend(group), group._transport.cpu._handle, native.PeerState()
        for name in OPERATIONS:
            for nbytes in SIZES:
                c = case(name, dist.get_rank(), size, OPERATIONS[name].split(max(1, nbytes // 4), size))
                call = reference.bind(c, OPERATIONS[name].make(c))
                before = None
                for _ in range(2):
                    dist.barrier(group)
                    assert native.lib.c10d_peer_state(handle, 0, 0, ctypes.byref(state)) == 0
                    if before is None:
                        before = state.blocks_in
                        call()
                if name not in ELSEWHERE:
                    counted.append((name, size, c.nbytes, state.blocks_in - before))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(counted))


def test_the_cost_model_counts_the_blocks_that_the_engine_counts(tmp_path, monkeypatch):
    for name in [n for n in os.environ if n.startswith(("PMI", "OMPI_COMM", "RANK", "WORLD_SIZE", "C10D_CUSTOM_"))]:
        monkeypatch.delenv(name)
    assert ranks.run(_count_blocks, 3, str(tmp_path / "blocks.json")) == 0
    counted = json.loads((tmp_path / "blocks.json").read_text())
    assert len(counted) == 2 * (len(OPERATIONS) - len(ELSEWHERE)) * len(SIZES) and sum(c[3] for c in counted) > 0
    assert [(*c[:3], cost(c[0], c[2], c[1]).blocks) for c in counted] == [tuple(c) for c in counted]


def test_points_take_what_was_measured_beside_them():
    small, large, results = cost_check.SIZES[0], cost_check.SIZES[-1], []
    for operation, nbytes, custom, noop, floor in (
            ("all_reduce", small, 9, 2, 1), ("gather", small, 6, 2, 1), ("scatter", small, 99, 2, 3),
            ("all_reduce", large, 5000, 2, 2000), ("gather", large - 4, 1, 2, 4000)):
        results += [{"operation": operation, "bytes": nbytes, "reference": name, "median_us": us}
                    for name, us in (("custom", custom), ("noop", noop), ("floor", floor))]
    first, second = cost_check.points({"ranks": 3, "hosts": [{"cores": 2}], "results": results})
    assert (first.operation, first.nbytes, second.operation, second.nbytes) == ("all_reduce", large, "gather", large - 4)
    assert (first.start, second.start) == (9e-6, 6e-6) and first.sync == second.sync == pytest.approx(7e-6)  # the middle of 7, 4, 97
    assert first.private == pytest.approx(3000e-6 / (2 * large))  # its footprint is the floor's
    assert first.ring == second.ring == first.private < second.private < 1e-6 / (2 * small)


def test_between_is_straight_in_logarithms():
    curve = [(100.0, 4.0), (1.0, 1.0)]
    assert [round(cost_check.between(curve, x), 9) for x in (0.5, 1, 10, 100, 1000)] == [1, 1, 2, 4, 4]


@pytest.mark.parametrize("n", [3, 8, 64])
def test_every_byte_of_a_result_was_read_and_written(n):
    S = 64 << 20
    whole = {name: cost(name, S, n).total(n) for name in OPERATIONS}
    assert whole["all_reduce"].private == 2 * n * S  # the floor: each rank reads and writes S
    assert whole["all_gather"].private == n * (S + S / n) and whole["reduce_scatter"].private == n * (S + S / n)
    assert whole["all_to_all"].private == 2 * n * S
    assert whole["gather"].private == whole["scatter"].private == 2 * S  # nothing moves n times
    assert whole["broadcast"].private == n * S
    assert whole["reduce"].private == (n + 1) * S


def test_a_fit_of_the_cost_model_finds_its_parameters():
    known = [cost_check.Point(o, n, size, 2, 0, 5e-6, 4e-6 * n, 1e-10, 3e-11) for o in OPERATIONS for n in (2, 4)
             for size in (16, 1 << 14, 1 << 20, 1 << 24)]
    truth = (cost_check._RING[11], cost_check._PER_BLOCK[9])
    measured = [replace(p, seconds=p.predicted(*truth)) for p in known]
    assert cost_check.fit(measured) == truth
    assert max(cost_check.errors(measured, truth)) < 1e-12
