"""The benchmark's groups: what is made and timed, and that its ranks begin with nothing of this package."""

import json
import re
import sys
from pathlib import Path

import pytest

from bench import forked
from unit.bench_cases import OWN_BENCH, run

pytestmark = pytest.mark.lane3

IMPORTED = f"import sys; sys.path.append({str(Path(OWN_BENCH[1]).parent)!r}); from bench import forked\n"


def python(*arguments):
    return run([sys.executable, *arguments])


def test_groups_of_each_backend_are_made_and_called(tmp_path):
    file = tmp_path / "groups.json"
    rounds, sizes = 2, (2, 3)
    options = ["--rounds", str(rounds), "--against", "gloo,noop", "--json", file]
    out = run([*OWN_BENCH, "groups", ",".join(map(str, sizes)), *options])
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
    out = python(forked.__file__, json.dumps([2, ["custom", "no such backend"], 1, True]))
    assert out.returncode == 1
    assert "2 ranks did not come to a group of the backend 'no such backend'" in out.stderr


FAULTS = """
import mmap, os, resource

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
    shared, own = (int(python("-c", IMPORTED + FAULTS, how).stdout) for how in ("leave", "unshare"))
    assert shared >= 4096 and own < 100, (shared, own)


def test_the_ranks_begin_with_torch_and_without_us():
    out = python("-c", IMPORTED + "print(*sys.modules)")
    loaded = {name.removeprefix("c10d_custom.") for name in out.stdout.split() if name.startswith("c10d_custom.")}
    assert "bench.noop" in loaded
    assert not {n for n in loaded if n.split(".")[0] in ("native", "transport", "creation", "lowering", "launch")}
    assert not loaded & {"c10d.process_group", "c10d.meeting", "c10d.backend"}


@pytest.mark.parametrize(
    "options, why",
    [
        (["groups", "1"], "at least 2"),
        (["groups", "two"], "invalid"),
        (["groups", "--against", "gloo,floor"], "floor makes no groups"),
        (["bar", "-r", "2"], "unrecognized"),
    ],
)
def test_what_cannot_run_is_refused_at_once(options, why):
    out = run([*OWN_BENCH, *options])
    assert out.returncode == 2 and why in out.stderr


@pytest.mark.parametrize("command", ["bar", "cost", "groups"])
def test_what_starts_jobs_of_its_own_is_no_rank_of_one(command):
    out = run([*OWN_BENCH, command], RANK="0", WORLD_SIZE="2")
    assert out.returncode == 2 and "not under torchrun or mpirun" in out.stderr
