"""scripts/gpu_check without a GPU: its limits, its report, its arithmetic, and that what it runs can be run at all."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpu.bench import goals
from gpu.bench.timing import Times, calls_for, figure, percentile
from gpu.check import sections as every
from gpu.check.__main__ import check, unknown_settings, why_not
from gpu.check.report import Report
from gpu.check.run import FAIL, NOT_RUN, PASS, Outcome, run
from gpu.check.sections import SECTIONS, Section
from harness.marks import marked

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = {"python": sys.executable, "device": "cpu", "work": "/nowhere", "root": str(ROOT)}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def tests_on_the_path(monkeypatch):
    """As scripts/gpu_check has it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])))


def section(code, name="fake", limit=20, least=1, **options):
    return Section(name, ("{python}", "-c", code), limit, least, **options)


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
def test_what_a_command_s_end_means(code, verdict, reason):
    outcome = run(section(code), CONTEXT, 20)
    assert (outcome.verdict, outcome.reason) == (verdict, reason), outcome.output


def test_a_command_that_cannot_be_started():
    outcome = run(Section("fake", ("/no/such/program",), 5, 1), CONTEXT, 5)
    assert outcome.verdict == FAIL and "could not be started" in outcome.reason


def test_a_command_over_its_limit_is_ended_with_its_children_and_keeps_its_output():
    code = (
        "import subprocess, sys, time, os; print(os.environ['C10D_TEST_COMMAND'], flush=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)"
    )
    began = time.monotonic()
    outcome = run(section(code), CONTEXT, 1.5)
    assert time.monotonic() - began < 15
    assert outcome.verdict == FAIL and outcome.cut and "limit of 2 s" in outcome.reason
    assert not marked(outcome.output.split()[0])


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
        ("time.sleep(100)", FAIL, ["limit of 6 s", "in test_c", "1 passed"]),
        (
            "assert 1 == 2\ndef test_d():\n    time.sleep(100)",
            FAIL,
            ["limit of 6 s", "in test_d", "1 failed", "test_c"],
        ),
    ],
    ids=["pass", "fail", "hang", "fail and hang"],
)
def test_tests_are_told_one_by_one(tmp_path, third, verdict, words):
    (tmp_path / "test_some.py").write_text(SOME_TESTS.format(third=third))
    command = (
        "{python}",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "gpu.check.outcomes",
        "-c",
        "/dev/null",
        str(tmp_path / "test_some.py"),
    )
    outcome = run(Section("fake", command, 20, 1), CONTEXT, 6)
    assert ("1 == 2" in outcome.output) == ("1 == 2" in third)
    assert outcome.verdict == verdict and all(word in outcome.reason for word in words), (
        outcome.reason,
        outcome.output,
    )


def test_only_skipped_tests_are_not_run(tmp_path):
    outcome = run(
        every.tests("fake", "test_streams.py", sizes="2", limit=60, least=1), {**CONTEXT, "device": "cuda"}, 60
    )
    if not torch.cuda.is_available():
        assert outcome.verdict == NOT_RUN and "no CUDA device" in outcome.reason, outcome


def test_the_report_is_there_from_the_start_and_after_every_section(tmp_path):
    path = tmp_path / "folder" / "report.txt"
    report = Report(path, ["device   none"])
    assert "not over when this was written" in path.read_text()
    report.add(Outcome("first", PASS, "3 passed", 1.5, "all of its output\n"))
    report.add(Outcome("second", FAIL, "exit code 1", 2.0, "Traceback (most recent call last)\n"))
    report.write(done=True)
    text = path.read_text()
    summary = text[: text.index("== first")]
    assert "PASS        1.5 s  first" in summary and "FAIL        2.0 s  second" in summary
    assert "1 PASS, 1 FAIL, 0 NOT RUN" in summary and "not over" not in text
    assert "all of its output" in text and "Traceback" in text and "device   none" in text
    assert os.listdir(path.parent) == ["report.txt"]


def run_all(sections, tmp_path, seconds, gpus=1):
    report = Report(tmp_path / "report.txt", [])
    check(sections, gpus, "cpu", CONTEXT, seconds, report)
    return report.outcomes


def test_one_section_s_failure_or_length_takes_nothing_from_the_others(tmp_path):
    sections = [
        section("import time; time.sleep(60)", "long", limit=50, least=1),
        section("raise KeyError('x')", "broken"),
        section("print('fine')", "last", least=3),
    ]
    began = time.monotonic()
    found = run_all(sections, tmp_path, 8)
    assert [o.verdict for o in found] == [FAIL, FAIL, PASS] and "KeyError" in found[1].output
    assert found[0].cut and time.monotonic() - began < 20


def test_what_there_is_no_time_for_is_told(tmp_path):
    found = run_all(
        [section("import time; time.sleep(20)", "first", least=1), section("pass", "second", least=3)], tmp_path, 1.0
    )
    assert found[1].verdict == NOT_RUN and found[1].cut and found[1].reason == "no time was left"


def test_every_section_is_sure_of_its_time():
    assert sum(s.least for s in SECTIONS) < 500 and all(s.least <= s.limit for s in SECTIONS)
    assert len({s.name for s in SECTIONS}) == len(SECTIONS)


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({}, None),
        ({"C10D_CUSTOM_WINDOW": "8"}, None),
        ({"C10D_CUSTOM_NO_SUCH_THING": "1"}, "does not know C10D_CUSTOM_NO_SUCH_THING"),
        ({"C10D_CUSTOM_WINDOW": "many"}, "does not know C10D_CUSTOM_WINDOW='many'"),
    ],
)
def test_sections_with_settings_that_the_package_lacks_are_not_run(settings, reason):
    asking = [section("pass", name="first", settings={"C10D_CUSTOM_SPIN_US": "7"}), section("pass", settings=settings)]
    found = why_not(asking[1], 1, "cuda", unknown_settings(asking))
    assert found is None if reason is None else reason in found


def gpu_check(*options, **environment):
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check", *options],
        text=True,
        capture_output=True,
        timeout=250,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


@no_gpu
def test_without_a_gpu_it_says_so_and_still_reports(tmp_path):
    out = gpu_check("--out", str(tmp_path / "report.txt"))
    text = (tmp_path / "report.txt").read_text()
    assert out.returncode == 2 and "no CUDA device" in out.stdout, out.stderr
    assert text.count("no CUDA device") >= len(SECTIONS) and f"0 PASS, 1 FAIL, {len(SECTIONS) - 1} NOT RUN" in text


def test_a_set_up_that_fails_is_reported(tmp_path):
    out = subprocess.run(
        [sys.executable, "-m", "gpu.check", "--out", str(tmp_path / "report.txt"), "--failed-set-up", __file__],
        text=True,
        capture_output=True,
        timeout=60,
        cwd=ROOT / "tests",
    )
    text = (tmp_path / "report.txt").read_text()
    assert out.returncode == 2 and "FAIL" in text and "the package could not be built here" in text and __doc__ in text


# --- what it runs, on the CPU


@pytest.mark.full("a minute; its parts are tested one by one")
def test_the_whole_command_on_the_cpu(tmp_path):
    out = gpu_check(
        "--device", "cpu", "--out", str(tmp_path / "report.txt"), "--sections", "environment,one rank,goals"
    )
    text = (tmp_path / "report.txt").read_text()
    # These sections measure no goal, so the last one cannot be judged.
    assert "NOT RUN" in text.split("== environment")[0] and out.returncode == 0, out.stdout + out.stderr + text
    assert "2 PASS, 0 FAIL, 1 NOT RUN" in text


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
            "not test_conformance and not test_faults and not test_memory",
        ],
        text=True,
        capture_output=True,
        timeout=400,
        cwd=ROOT,
    )
    assert out.returncode == 0 and " passed" in out.stdout and "failed" not in out.stdout, out.stdout + out.stderr


@pytest.mark.full("a minute; of use to who changes the benchmarks")
@pytest.mark.parametrize(
    "module, options",
    [
        ("all_reduce", ["--ranks", "2", "--largest", "65536"]),
        ("operations", ["--largest", "65536"]),
        ("modes", ["--largest", "1024"]),
        ("ddp", ["--ranks", "2", "--largest", "400000"]),
    ],
)
def test_the_benchmarks_on_the_cpu(tmp_path, module, options):
    out = subprocess.run(
        [
            sys.executable,
            "-m",
            f"gpu.bench.{module}",
            "--device",
            "cpu",
            "--json",
            str(tmp_path / "x.json"),
            "--seconds",
            "200",
            *options,
        ],
        text=True,
        capture_output=True,
        timeout=250,
        cwd=ROOT / "tests",
    )
    figures = goals.figures(tmp_path)
    assert out.returncode == 0 and "SUMMARY:" in out.stdout, out.stdout + out.stderr
    assert module == "modes" or {f["backend"] for f in figures} >= {"custom", "gloo"}
    assert all(f["single_us"] > 0 and f["row_us"] > 0 for f in figures)


def test_no_folder_of_the_tests_hides_a_package_that_ranks_import():
    """tests/ is on the ranks' path, in front: a package `cuda` there would take the place of cuda.bindings'."""
    packages = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    assert not packages & {"cuda", "cupy", "torch", "numpy", "mpi4py"}


# --- arithmetic


def test_a_figure_is_the_slowest_rank_s_median():
    blocks = [
        [Times([1.0, 2.0, 9.0], 1.0), Times([3.0, 3.0, 3.0], 2.0)],
        [Times([2.0, 2.0, 2.0], 3.0), Times([1.0, 1.0, 3.0], 4.0)],
    ]
    found = figure(blocks)
    assert (found.single, found.row, found.worst, found.calls) == (3.0, 3.0, 9.0, 6)


@pytest.mark.parametrize(
    "values, share, wanted",
    [([1], 0.9, 1), (range(1, 11), 0.9, 9), (range(1, 11), 0.91, 10), ([5, 1, 3], 0.5, 3), ([2, 1], 0.0, 1)],
)
def test_percentile(values, share, wanted):
    assert percentile(list(values), share) == wanted


def test_calls_for_a_block():
    assert [calls_for(s, 0.12) for s in (1e-6, 0.001, 0.02, 5.0)] == [200, 60, 3, 2]


def result(**fields):
    return {
        "operation": "all_reduce",
        "ranks": 4,
        "bytes": 256 << 20,
        "backend": "custom",
        "floor_us": 1000.0,
        **fields,
    }


def test_goals_are_judged():
    met = [result(row_us=2999.0, single_us=3000.0), result(backend="gloo", row_us=0.0, single_us=30000.0)]
    missed = [result(row_us=3001.0, single_us=3001.0), result(backend="gloo", row_us=0.0, single_us=30000.0)]
    assert [m for _, m in goals.floor_goal(met) + goals.gloo_goal(met)] == [True, True]
    assert [m for _, m in goals.floor_goal(missed) + goals.gloo_goal(missed)] == [False, False]
    steps = [
        {"operation": "ddp", "ranks": 2, "parameters": p, "backend": b, "single_us": us}
        for p, b, us in ((1, "custom", 5), (1, "gloo", 5), (2, "custom", 6), (2, "gloo", 5))
    ]
    assert [m for _, m in goals.ddp_goal(steps)] == [True, False]
    assert not goals.gloo_goal([result(bytes=1024, single_us=1.0), result(bytes=1024, backend="gloo", single_us=2.0)])
