"""The benchmark's small calls, and its DDP steps: that each is made and printed; figures are nobody's business here."""

import json

import pytest
import torch

from bench import models
from bench.small_calls import IN_FLIGHT
from c10d_custom.bench import noop
from unit.bench_cases import OWN_BENCH, QUICK, run

pytestmark = pytest.mark.lane3

CALLS = [
    "all_reduce, 4 B",
    "all_reduce, 1 KB",
    "barrier",
    "send + recv, 4 B",
    "isend + irecv, 1 KB",
    "async, 1 KB",
    "async, 1 KB, by its future",
    f"{IN_FLIGHT} in flight, 1 KB",
    f"{IN_FLIGHT} in flight, by futures",
    f"{IN_FLIGHT} one by one, 1 KB",
]
STEPS = ["to issue it", "wait()", "wait(), again", "is_completed()", "get_future()", "its future's wait()"]


def test_small_calls_and_the_steps_of_an_asynchronous_one_are_timed_for_each_backend(tmp_path):
    out = run([*OWN_BENCH, "small-calls", "-r", "3", "--against", "gloo,noop", "--json", tmp_path / "run.json", *QUICK])
    assert out.returncode == 0, out.stderr
    written = json.loads((tmp_path / "run.json").read_text())["small_calls"]
    names = ("custom", "gloo", "noop")
    assert [(r["what"], r["reference"]) for r in written] == [(w, n) for w in CALLS + STEPS for n in names]
    assert all(len(r["blocks_us"]) == 1 and r["blocks_us"][0] > 0 for r in written)
    lines = {line[:28].strip(): line.split() for line in out.stdout.splitlines()}
    for what in CALLS + STEPS:
        ours, theirs, nothing = (r["blocks_us"][0] for r in written if r["what"] == what)
        *_, ratio, over = lines[what]
        assert ratio == f"{theirs / ours:.1f}" and over == f"{ours - nothing:.2f}"


def test_matmuls_are_timed_alone_and_beside_all_reduces(tmp_path):
    out = run([*OWN_BENCH, "beside", "--rounds", "2", "--json", tmp_path / "run.json"])
    assert out.returncode == 0, out.stderr
    took = json.loads((tmp_path / "run.json").read_text())["seconds"]
    assert list(took) == ["alone", "threads1", "custom"]
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in took.values())
    assert "threads by default cost them" in out.stdout


def test_ddp_steps_are_timed_beside_a_group_that_does_nothing(tmp_path):
    out = run([
        *OWN_BENCH, "ddp", "8x2,16x3", "--batch", "2", "--against", "gloo,noop", "--json",
        str(tmp_path / "ddp.json"), *QUICK,
    ])  # fmt: skip
    assert out.returncode == 0, out.stderr
    written = json.loads((tmp_path / "ddp.json").read_text())["ddp"]
    assert [(r["model"], r["reference"]) for r in written] == [
        (model, name) for model in ("8x2", "16x3") for name in ("custom", "gloo", "noop")
    ]
    assert {r["parameters"] for r in written if r["model"] == "8x2"} == {144}
    names = {r["model"] for r in written}
    rows = [words for line in out.stdout.splitlines() if (words := line.split()) and words[0] in names]
    assert len(rows) == len(written)
    for r, row in zip(written, rows):
        comm = {w["reference"]: w["comm"] for w in written if w["model"] == r["model"]}
        base, nothing = comm["gloo"], comm["noop"]
        assert row[-1] == (f"{(r['comm'] - nothing) / (base - nothing):.2f}" if base > nothing else "-")


@pytest.mark.parametrize("name", ["7x3", *models.NAMED])
def test_a_model_is_the_same_wherever_it_is_made(name):
    first, second = models.make(name), models.make(name)
    assert [p.tolist() for p in first.module.parameters()] == [p.tolist() for p in second.module.parameters()]
    x = first.inputs(2, torch.Generator().manual_seed(0))
    first.module(x).square().mean().backward()
    sizes = sorted(p.numel() for p in first.module.parameters())
    assert all(p.grad is not None for p in first.module.parameters()) and sum(sizes) == first.parameters
    if name in models.NAMED:  # a mix: most gradients are small, most bytes are in large ones
        assert sizes[len(sizes) // 2] < 10_000 and sum(s for s in sizes if s >= 100_000) > first.parameters / 2


@pytest.mark.parametrize("name", ["", "x", "8x", "0x4", "8x0", "-8x2", "8x2x2", "resnet18"])
def test_other_names_are_no_models(name):
    assert not models.known(name)


def test_what_the_group_that_does_nothing_gives_ddp():
    group = noop.NoopProcessGroup(0, 2, "nothing")
    mine, theirs = torch.arange(3), [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
    assert group.allgather([theirs], [mine]).wait() and all(t.equal(mine) for t in theirs)
    assert group.allreduce([mine]).get_future().wait() == [mine]
