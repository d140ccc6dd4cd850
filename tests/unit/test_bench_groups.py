"""The benchmark's groups: what is made and timed, and that its ranks begin with nothing of this package."""

import json
import os
import re
import subprocess
import sys

import pytest

from c10d_custom.bench import forked
from unit.bench_cases import parsed

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "RANK", "WORLD_SIZE"))}


def run(*command):
    return subprocess.run([sys.executable, *command], text=True, capture_output=True, timeout=200, env=CLEAN)


def test_groups_of_each_backend_are_made_and_called(tmp_path):
    file = tmp_path / "groups.json"
    rounds, sizes = 2, (2, 3)
    out = run(
        *("-m", "c10d_custom", "bench", "--groups", ",".join(map(str, sizes)), "--rounds", str(rounds)),
        *("--against", "gloo,noop", "--json", str(file)),
    )
    assert out.returncode == 0, out.stderr
    rows = re.findall(r"^ +(\d) +(custom|gloo|noop)((?: +(?:[\d.]+|-|\|))+)$", out.stdout, re.M)
    assert [row[:2] for row in rows] == [(str(n), name) for n in sizes for name in ("custom", "gloo", "noop")]
    results = json.loads(file.read_text())["results"]
    for (_, name, figures), result in zip(rows, results, strict=True):
        assert result["reference"] == name
        ms = result["ms"]
        assert len(ms["init"]) == len(ms["call"]) == rounds
        assert len(ms["group"]) == len(ms["group_call"]) == rounds * forked.groups_of_a_round(result["ranks"])
        for made, called in (("init", "call"), ("group", "group_call")):
            assert all(0 < m <= c for m, c in zip(sorted(ms[made]), sorted(ms[called]), strict=True))
        ratios = [figure for figure in figures.split() if figure == "-"]
        assert len(ratios) == (3 if name == "gloo" else 0)


def test_a_rank_that_fails_ends_the_command():
    out = run("-m", "c10d_custom.bench.forked", json.dumps([2, ["custom", "no such backend"], 1, True]))
    assert out.returncode == 1
    assert "2 ranks did not come to a group of the backend 'no such backend'" in out.stderr


FAULTS = """
import mmap, os, resource, sys
from c10d_custom.bench import forked

memory = bytearray(4096 * mmap.PAGESIZE)
memory[::mmap.PAGESIZE] = bytes(range(256)) * 16

def child(_):
    if sys.argv[1] == "unshare":
        forked._unshare()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory[1::mmap.PAGESIZE] = bytes(4096)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
    assert memory[::mmap.PAGESIZE] == bytes(range(256)) * 16

assert os.waitpid(forked._forked(child, 0), 0)[1] == 0
"""


def test_a_rank_s_memory_is_its_own_before_it_is_timed():
    shared, own = (int(run("-c", FAULTS, how).stdout) for how in ("leave", "unshare"))
    assert shared >= 4096 and own < 100, (shared, own)


def test_the_ranks_begin_with_torch_and_without_us():
    out = run("-c", "import sys, c10d_custom.bench.forked; print(*sys.modules)")
    loaded = {name.removeprefix("c10d_custom.") for name in out.stdout.split() if name.startswith("c10d_custom.")}
    assert "bench.forked" in loaded
    assert not {n for n in loaded if n.split(".")[0] in ("native", "transport", "creation", "lowering", "launch")}
    assert not loaded & {"c10d.process_group", "c10d.meeting", "c10d.backend"}


@pytest.mark.parametrize(
    "options, why",
    [
        (["--groups", "1"], "at least 2"),
        (["--groups", "two"], "invalid"),
        (["--groups", "--against", "gloo,floor"], "floor makes no groups"),
        (["--groups", "-r", "2"], "how many ranks"),
    ],
)
def test_what_cannot_run_is_refused_at_once(options, why, monkeypatch, capsys):
    for name in set(os.environ) - set(CLEAN):
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as end:
        args = parsed("bench", *options)
        args.run(args)
    assert end.value.code == 2 and why in capsys.readouterr().err
