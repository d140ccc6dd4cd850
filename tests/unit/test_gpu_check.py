"""scripts/gpu_check without a GPU: its presets, its limits, its report, and that whatever ends it leaves no process."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

import c10d_custom
from c10d_custom.config import SETTINGS, Config
from gpu.check import presets
from gpu.check.__main__ import chosen
from gpu.check.presets import PRESETS, SECONDS, WITHOUT_GPU, Part
from gpu.check.report import Report
from gpu.check.run import FAIL, LAST_WORDS, NOT_RUN, PASS, RUNNING, Outcome, Running
from harness.marks import marked

pytestmark = pytest.mark.lane2

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ("--device", "simulated", "--package", Path(c10d_custom.__file__).parents[1])
CONTEXT = {"python": sys.executable, "device": "cpu", "site": "", "data": "/nowhere", "root": str(ROOT)}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
LONG = ("rest", "wide")
every_preset = pytest.mark.parametrize("preset", PRESETS)


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    """Those of a simulated GPU are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("C10D_TEST_KERNELS", str(tmp_path_factory.mktemp("kernels")))
        yield


# --- presets


@every_preset
def test_a_preset_fits_its_time(preset):
    parts = PRESETS[preset]
    assert sum(part.limit for part in parts) <= SECONDS[preset] <= 540
    assert all(part.limit > LAST_WORDS for part in parts)
    assert len({part.name for part in parts}) == len(parts)
    assert [part.name for part in parts[:2]] == ["set-up", "environment"]


@every_preset
def test_what_a_preset_names_is_there(preset):
    for part in PRESETS[preset]:
        Config.from_env(part.settings)
        assert set(part.settings) <= {setting.variable for setting in SETTINGS.values()}
        words = part.command
        for word in words:
            assert not word.startswith("tests/") or (ROOT / word).is_file(), word
        for module in (after for word, after in zip(words, words[1:]) if word == "-m"):
            there = module in ("pytest", "c10d_custom") or (ROOT / "tests" / f"{module.replace('.', '/')}.py").is_file()
            assert there, module


def test_every_file_of_gpu_tests_is_in_a_preset():
    named = {word for parts in PRESETS.values() for part in parts for word in part.command}
    assert {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= named


# --- one part


def run(part, folder, limit, look=lambda outcome: None, **context):
    folder.mkdir(exist_ok=True)
    mark = uuid.uuid4().hex
    outcome = Running(part, {**CONTEXT, "limit": limit, **context}, folder, mark).run(limit, look)
    assert not marked(mark)
    return outcome


def part(code):
    return Part("fake", ("{python}", "-c", code), 20)


@pytest.mark.parametrize(
    "code, verdict, reason",
    [
        ("print('SUMMARY: 3 of 3')", PASS, "3 of 3"),
        ("print('told'); raise SystemExit(1)", FAIL, "exit code 1"),
        ("print('NOT RUN: no such thing'); raise SystemExit(3)", NOT_RUN, "no such thing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", FAIL, "exit code -11"),
    ],
    ids=["passes", "fails", "cannot", "crashes"],
)
def test_what_a_command_s_end_means(tmp_path, code, verdict, reason):
    outcome = run(part(code), tmp_path, 20)
    assert (outcome.verdict, outcome.reason) == (verdict, reason), outcome.output


def test_a_command_that_cannot_be_started(tmp_path):
    outcome = run(Part("fake", ("/no/such/program",), 5), tmp_path, 5)
    assert outcome.verdict == FAIL and "could not be started" in outcome.reason


def test_a_command_over_its_limit_is_ended_with_its_children_and_keeps_its_output(tmp_path):
    code = (
        "import subprocess, sys, time; print('begun', flush=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)"
    )
    began = time.monotonic()
    outcome = run(part(code), tmp_path, 2)
    assert time.monotonic() - began < 15
    assert outcome.verdict == FAIL and outcome.cut and "limit of 2 s" in outcome.reason
    assert outcome.output == "begun\n"


SOME_TESTS = """
import time, pytest
def test_a(): pass
@pytest.mark.skip(reason="no such hardware")
def test_b(): pass
def test_c():
    {third}
"""


@pytest.mark.parametrize(
    "third, verdict, words",
    [
        ("pass", PASS, ["2 passed", "no such hardware"]),
        ("assert 1 == 2", FAIL, ["1 passed, 1 failed", "test_c"]),
        ("time.sleep(100)", FAIL, ["limit of 12 s", "in test_c", "1 passed"]),
        (
            "assert 1 == 2\ndef test_d():\n    time.sleep(100)",
            FAIL,
            ["limit of 12 s", "in test_d", "1 failed", "test_c"],
        ),
    ],
    ids=["pass", "fail", "hang", "fail and hang"],
)
def test_tests_are_told_one_by_one(tmp_path, third, verdict, words):
    (tmp_path / "test_some.py").write_text(SOME_TESTS.format(third=third))
    command = "{python} -m pytest -q -p no:cacheprovider -p gpu.check.outcomes -c /dev/null".split()
    looks = []
    test, limit = str(tmp_path / "test_some.py"), 12 if "sleep" in third else 60
    outcome = run(Part("fake", (*command, test), limit), tmp_path / "part", limit, looks.append)
    assert ("1 == 2" in outcome.output) == ("1 == 2" in third)
    assert outcome.verdict == verdict and all(word in outcome.reason for word in words), (
        outcome.reason,
        outcome.output,
    )
    assert {look.verdict for look in looks} <= {RUNNING}
    assert "hang" not in third or "1 passed" in looks[-1].reason


def test_only_skipped_tests_are_not_run(tmp_path):
    outcome = run(presets.tests("fake", 60, "2", "test_streams.py"), tmp_path, 60, device="cuda")
    if not torch.cuda.is_available():
        assert outcome.verdict == NOT_RUN and "no CUDA device" in outcome.reason, outcome


# --- the report

HEAD = dict.fromkeys(Report.HEAD, "") | {"device": "none", "commit": "unknown"}


def test_the_report_is_there_from_the_start_and_after_every_part(tmp_path):
    folder, data = tmp_path / "folder", tmp_path / "data"
    data.mkdir()
    report = Report(folder, "report", HEAD, data)
    text, words = folder / "report.txt", folder / "report.json"
    assert "not over when this was written" in text.read_text() and not json.loads(words.read_text())["over"]
    report.add(Outcome("first", PASS, "3 passed", 1.5, "all of its output\n"))
    report.add(Outcome("second", RUNNING, "1 passed", 1.0))
    assert "RUNNING     1.0 s  second" in text.read_text() and "1 RUNNING so far" in text.read_text()
    report.add(Outcome("second", FAIL, "exit code 1", 2.0, "Traceback (most recent call last)\n"))
    (data / "figures.json").write_text("[1, 2]")
    report.write(over=True)
    said = text.read_text()
    summary = said[: said.index("== first")]
    assert "PASS        1.5 s  first" in summary and "FAIL        2.0 s  second" in summary
    assert "1 PASS, 1 FAIL, 0 NOT RUN" in summary and "not over" not in said and "RUNNING" not in said
    assert "all of its output" in said and "Traceback" in said and "device   none" in said
    found = json.loads(words.read_text())
    assert found["over"] and found["commit"] == "unknown" and found["data"] == {"figures": [1, 2]}
    assert [(p["name"], p["verdict"]) for p in found["parts"]] == [("first", PASS), ("second", FAIL)]
    assert sorted(os.listdir(folder)) == ["report.json", "report.txt"]


# --- the command


def gpu_check(*options, **environment):
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check", *options],
        text=True,
        capture_output=True,
        timeout=550,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


@no_gpu
@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in WITHOUT_GPU])
def test_without_a_gpu_it_ends_at_once_with_one_sentence(tmp_path, preset):
    out = gpu_check(preset, "--out", str(tmp_path))
    assert (out.returncode, out.stderr) == (2, "")
    assert out.stdout == f"There is no CUDA device here, so the preset {preset} was not run.\n"
    assert not os.listdir(tmp_path)


def test_list():
    out = gpu_check("--list").stdout
    for preset, parts in PRESETS.items():
        assert f"{preset}: {sum(part.limit for part in parts):.0f} s at most" in out
        assert all(part.name in out for part in parts)
    assert [word in out for word in ("once: 540 s", "more: 300 s", "cores: 120 s")] == [True] * 3
    assert sum(part.limit for part in PRESETS["once"][2:]) <= 475


def test_what_the_python_at_hand_lacks_is_told(tmp_path):
    code = "import sys; from gpu.check import set_up; set_up.FOR['cpu'] = ('torch', 'no_such'); "
    out = subprocess.run(
        [sys.executable, "-c", code + f"sys.exit(set_up.main({str(tmp_path / 'site')!r}, 'cpu'))"],
        text=True,
        capture_output=True,
        timeout=60,
        cwd=ROOT / "tests",
    )
    assert out.returncode == 1 and "lacks no_such" in out.stdout and not (tmp_path / "site").exists()


def test_a_package_that_is_not_there(tmp_path):
    out = gpu_check("once", "--package", str(tmp_path))
    assert out.returncode == 2 and f"there is no c10d_custom in {tmp_path}" in out.stderr


def test_the_whole_command(tmp_path):
    """The whole command but for the build: the package is the one that is installed."""
    out = gpu_check("rest", *INSTALLED, "--out", str(tmp_path), "--commit", "this one", "--only", "that end,kernels")
    (file,) = tmp_path.glob("*-rest-this-one.json")
    said = json.loads(file.read_text())
    assert out.returncode == 0 and said["over"], out.stdout + out.stderr
    assert (said["commit"], said["device"], said["kind"]) == ("this one", "simulated", "simulated")
    verdicts = {part["name"]: part["verdict"] for part in said["parts"]}
    wanted = "set-up", "environment", "kernels compiled", "memory of processes that end"
    assert verdicts == dict.fromkeys(wanted, PASS)


@pytest.mark.full("a build of the package, as scripts/wheels makes it, too")
@pytest.mark.timeout(300)
def test_the_package_is_built_once(tmp_path):
    """Of the same sources: the second preset finds it there."""
    said = []
    for _ in range(2):
        out = gpu_check("once", "--device", "simulated", "--out", str(tmp_path), "--only", "set-up")
        said += [line for line in out.stdout.splitlines() if " set-up " in line]
    assert "PASS" in said[0] and "built before, in" in said[1], said


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=pytest.mark.full("minutes; the parts' tests run elsewhere")) if name in LONG else name
        for name in PRESETS
    ],
)
def test_a_little_of_each_part_on_a_simulated_gpu(tmp_path, preset):
    """Real processes, whose fused kernels wait for each other in memory that they share (tests/cuda/host_gpu.py). Not
    the part "MPS", which asks whether a real GPU runs kernels of two processes side by side; parts "under MPS" have no
    daemon here (one of its own: test_mps_has_a_daemon_of_our_own), and those called "as graphs" no graphs, as CPU
    tensors stand in for the GPU's. Neither is NCCL here, nor compute-sanitizer, nor "in place", for which tensors
    would have to be mapped. "cores" has CPU tensors."""
    out = gpu_check(preset, *INSTALLED, "--out", str(tmp_path), "--short")
    (file,) = tmp_path.glob("*.json")
    said = {part["name"]: (part["verdict"], part["reason"]) for part in json.loads(file.read_text())["parts"]}
    assert set(said) == {part.name for part in PRESETS[preset]}
    for part in PRESETS[preset]:
        verdict, reason = said[part.name]
        if part.name == "goals":  # of sizes that are left out
            assert reason == "no figure was measured"
        else:
            assert verdict == PASS if part.simulated else "needs a real GPU" in reason, (part.name, reason, out.stdout)


CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo started in $CUDA_MPS_PIPE_DIRECTORY > $CUDA_MPS_LOG_DIRECTORY/control.log
else read word; echo $word $CUDA_MPS_PIPE_DIRECTORY >> {told}; fi
"""


def test_mps_has_a_daemon_of_our_own(tmp_path):
    """One that does nothing is started, has clients, and is told to quit; its log is kept, its folder is not."""
    told, control = tmp_path / "told", tmp_path / "nvidia-cuda-mps-control"
    control.write_text(CONTROL.format(told=told))
    control.chmod(0o755)
    client = "import os; print(os.environ['CUDA_MPS_PIPE_DIRECTORY']); raise SystemExit(7)"
    command = [sys.executable, "-m", "gpu.mps", "cuda", sys.executable, "-c", client]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    out = subprocess.run(command, text=True, capture_output=True, timeout=60, cwd=ROOT / "tests", env=environment)
    pipe = out.stdout.splitlines()[0]
    assert out.returncode == 7 and f"--- control.log\nstarted in {pipe}" in out.stdout, out
    assert told.read_text() == f"quit {pipe}\n" and not Path(pipe).parent.exists()


def having(variable):
    """Processes, zombies excepted, that have this in their environment."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if variable.encode() in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found.append(entry)
        except OSError:
            continue
    return found


SOME_CUTS = [
    *range(2),
    *(pytest.param(i, marks=pytest.mark.full("a cut at another random second")) for i in range(2, 20)),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("nth", SOME_CUTS)
def test_cut_off_at_any_second_it_leaves_a_report_and_no_process(tmp_path, record_property, nth):
    """Of a preset from a random part on, so that every part may be the one that is cut off."""
    preset = random.choice(list(PRESETS))
    begins = random.randrange(2, len(PRESETS[preset]))
    only = ",".join(part.name.split(", ")[-1] for part in PRESETS[preset][begins:])
    seconds = random.uniform(0, 15)  # some parts take no longer on the CPU
    while (where := cut(tmp_path / f"{seconds:.2f}", preset, only, seconds)) is None:
        seconds /= 2
    record_property("figures", f"{preset}, {seconds:.1f} s after the beginning of {where}")


def cut(folder, preset, only, seconds):
    """What has run then, or None: it was over before."""
    (temporary := folder / "tmp").mkdir(parents=True)
    what, variable = f"{preset} --only {only!r} after {seconds:.1f} s", f"CUT_OFF={uuid.uuid4().hex}"
    process = subprocess.Popen(
        [ROOT / "scripts" / "gpu_check", preset, *INSTALLED, "--out", folder / "out", "--only", only],
        env={**os.environ, "PYTHON": sys.executable, "TMPDIR": str(temporary), "CUT_OFF": variable.split("=")[1]},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not list(folder.glob("out/*.json")):  # until it has begun
        assert process.poll() is None, what
        time.sleep(0.02)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 20
    while (left := having(variable)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, f"{what}: processes {left}"
    assert not os.listdir(temporary), what
    (file,) = folder.glob("out/*.json")
    said, text = json.loads(file.read_text()), file.with_suffix(".txt").read_text()
    assert said["preset"] == preset and "preset   " + preset in text, what
    names = [part.name for part in chosen(preset, only)]
    assert [part["name"] for part in said["parts"]] == names[: len(said["parts"])], what
    over = {part["name"] for part in said["parts"] if part["verdict"] != RUNNING}
    assert all(f"== {name} " in text for name in over), what
    assert said["over"] or "not over when this was written" in text, what
    if seconds > 10:
        assert said["parts"], what
    return None if said["over"] else ", ".join(names[: len(over) + 1])


# --- what it runs, on the CPU


@pytest.mark.timeout(420)
def test_the_gpu_tests_bodies_on_the_cpu():
    """Without those that the CPU's own tests hold already: the whole table of cases, and what a busy machine makes
    late."""
    out = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/gpu",
            "--device",
            "cpu",
            "--world-sizes",
            "2",
            "-k",
            "not test_conformance and not test_faults and not test_memory and not (test_one_gpu and (2 or 4 or 8))",
        ],
        text=True,
        capture_output=True,
        timeout=400,
        cwd=ROOT,
    )
    assert out.returncode == 0 and " passed" in out.stdout and "failed" not in out.stdout, out.stdout + out.stderr


def test_no_folder_of_the_tests_hides_a_package_that_ranks_import():
    """tests/ is on the ranks' path, in front: a package `cuda` there would take the place of cuda.bindings'."""
    packages = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert not packages & {"cuda", "cupy", "torch", "numpy", "mpi4py"}
