"""The bar, and the cost model: what they say of given measurements."""

import ctypes
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from bench import bar, cost_check, parts
from bench.cost import cost
from bench.parts import Part
from c10d_custom.bench import command, ranks
from c10d_custom.bench.operations import OPERATIONS
from unit.bench_cases import case, parsed

pytestmark = pytest.mark.lane3


def fake_runs(ours=1.0):
    """What each part would write, if every call took us ``ours`` us and the others as in ``theirs``."""
    theirs = {"custom": ours, "gloo": 30.0, "mpi": 2.0, "floor": 1.0, "noop": 0.5}
    runs = {}
    for part in bar.plan(busy=0):
        if part.command[-1] == "ddp":
            runs[part.name] = {
                "ddp": [
                    {"model": "1024x6", "reference": "custom", "comm": ours},
                    {"model": "1024x6", "reference": "gloo", "comm": 4.0},
                ]
            }
            continue
        args = parsed("bench", *part.options)
        runs[part.name] = {
            "ranks": args.ranks or part.mpi_ranks,
            "results": [
                {"operation": o, "bytes": s, "reference": n, "median_us": theirs[n]}
                for o in args.operations
                for s in command._sizes(args)
                for n in ("custom", *args.against)
            ],
        }
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
        if part.command == parts.BENCH:
            assert parsed("bench", *part.options).busy == 1
            assert part.text().startswith("mpiexec -n 2 python" if part.mpi_ranks else "python -m c10d_custom bench ")
        else:
            assert part.command == (*parts.OWN, "ddp") and "--busy" in part.options


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
    """Rank 0 writes how many blocks one call of each operation and size passes through the rings, of three ranks and of
    two."""
    from c10d_custom import native
    from c10d_custom.bench import references

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
        ("all_reduce", small, 9, 2, 1),
        ("gather", small, 6, 2, 1),
        ("scatter", small, 99, 2, 3),
        ("all_reduce", large, 5000, 2, 2000),
        ("gather", large - 4, 1, 2, 4000),
    ):
        results += [
            {"operation": operation, "bytes": nbytes, "reference": name, "median_us": us}
            for name, us in (("custom", custom), ("noop", noop), ("floor", floor))
        ]
    first, second = cost_check.points({"ranks": 3, "hosts": [{"cores": 2}], "results": results})
    assert (first.operation, first.nbytes, second.operation, second.nbytes) == (
        "all_reduce",
        large,
        "gather",
        large - 4,
    )
    assert (first.start, second.start) == (9e-6, 6e-6) and first.sync == second.sync == pytest.approx(
        7e-6
    )  # the middle of 7, 4, 97
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
    known = [
        cost_check.Point(o, n, size, 2, 0, 5e-6, 4e-6 * n, 1e-10, 3e-11)
        for o in OPERATIONS
        for n in (2, 4)
        for size in (16, 1 << 14, 1 << 20, 1 << 24)
    ]
    truth = (cost_check._RING[11], cost_check._PER_BLOCK[9])
    measured = [replace(p, seconds=p.predicted(*truth)) for p in known]
    assert cost_check.fit(measured) == truth
    assert max(cost_check.errors(measured, truth)) < 1e-12
