"""Where a small call's time goes: the command says it for each call, and its columns add up."""

import json
import subprocess

import pytest

from bench.call_steps import COLUMNS, steps
from unit.bench_cases import OWN_BENCH


def test_the_columns_add_up_to_the_whole():
    layers = {"whole": 7.0, "method": 4.5, "core": 3.25, "alone": 0.5, "noop": 1.0}
    assert steps(layers) == {"torch": 2.5, "method": 1.25, "core": 0.5, "others": 2.75}


def test_every_call_is_taken_apart(tmp_path):
    file = tmp_path / "steps.json"
    command = [*OWN_BENCH, "steps", "--rounds", "1", "--seconds", "0.001"]
    done = subprocess.run([*command, "--json", file], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(file.read_text())
    assert [(s["operation"], s["bytes"]) for s in said["steps"]] == [
        ("all_reduce", 4),
        ("all_reduce", 1024),
        ("all_reduce", 16384),
        ("barrier", 0),
    ]
    for s in said["steps"]:
        layers = s["layers_us"]
        assert sum(steps(layers).values()) == pytest.approx(layers["whole"])
        assert min(layers.values()) > 0
        row = next(line for line in done.stdout.splitlines() if line.split()[:2] == [s["operation"], str(s["bytes"])])
        assert len(row.split()) == 2 + len(COLUMNS) + 3
        assert float(row.split()[-3]) == pytest.approx(layers["whole"], abs=0.01)
