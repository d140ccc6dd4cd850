"""Options of the suite, and the rank pools that its tests share. See conformance/README.md."""

import gc
import os
import sys
import sysconfig

import pytest

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    os.environ.setdefault("PYTHON_GIL", "0")  # of ranks: triton, which torch._dynamo imports, would turn the lock on
sys.path.append(os.path.join(os.path.dirname(__file__), "..", "scripts"))  # for its package `bench`

from harness import Layout, RankPool


def pytest_addoption(parser):
    group = parser.getgroup("c10d-custom")
    group.addoption(
        "--backend",
        default=os.environ.get("C10D_TEST_BACKEND", "custom"),
        help="name given to init_process_group (default: custom)",
    )
    group.addoption("--full", action="store_true", help="the whole cross product instead of the covering selection")
    group.addoption(
        "--world-sizes", help="world sizes to run, comma-separated (default: 2,3,4,8; with --job the job's)"
    )
    group.addoption(
        "--device",
        choices=("cuda", "cpu", "simulated"),
        default="cuda",
        help="device of the tensors of tests/gpu (default: cuda; cpu, simulated: try them where there is no GPU)",
    )
    group.addoption(
        "--job",
        default=os.environ.get("C10D_TEST_JOB"),
        help="run ranks as jobs: ranks per emulated host, as 2+2, openmpi:3+1 or torchrun:2+2; 4 is one host, this one",
    )


def pytest_generate_tests(metafunc):
    """`ranks` runs at every world size, or at those that @pytest.mark.world_sizes(...) names."""
    if "ranks" not in metafunc.fixturenames:
        return
    layout = Layout.chosen()
    sizes = metafunc.config.getoption("world_sizes") or (str(layout.world_size) if layout else "2,3,4,8")
    chosen = [int(n) for n in sizes.split(",")]
    marker = metafunc.definition.get_closest_marker("world_sizes")
    if marker:
        if unknown := set(marker.args) - {2, 3, 4, 8}:
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: no run has world sizes {unknown}; take a RankPool")
        chosen = [n for n in chosen if n in marker.args]
    metafunc.parametrize("ranks", chosen, indirect=True, ids=[f"{n}ranks" for n in chosen])


def pytest_configure(config):
    if job := config.getoption("job"):
        try:
            Layout.parse(job)
        except ValueError as error:
            raise pytest.UsageError(f"--job: {error}") from None
        os.environ["C10D_TEST_JOB"] = job  # for those who start ranks past this file
    config.addinivalue_line("markers", "world_sizes(*sizes): the world sizes at which this test makes sense")
    for lane in ("lane2", "lane3"):
        config.addinivalue_line("markers", f"{lane}: no rank is timed; scripts/test runs these beside the rest")
    config.addinivalue_line("markers", "full(reason): a slow test that runs with --full only, and why it may")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if lane := getattr(sys.modules.get(item.module.__package__), "LANE", None):
            item.add_marker(lane)
        marker = item.get_closest_marker("full")
        if marker and not config.getoption("full"):
            item.add_marker(pytest.mark.skip(reason=f"only with --full: {marker.args[0]}"))


def pytest_collection_finish(session):
    gc.freeze()  # many tests collect garbage, and of what is there now nothing is


def pytest_sessionstart(session):
    layout = Layout.chosen()
    if layout and (reason := layout.why_not()):
        pytest.exit(f"--job {layout}: {reason}", returncode=5)


@pytest.fixture(scope="session")
def backend(request):
    return request.config.getoption("backend")


@pytest.fixture(scope="session")
def full(request):
    return request.config.getoption("full")


MOST_RERUN = 2  # tests of one run that may fail at first (--reruns, .ci/run): more are no accident


def pytest_terminal_summary(terminalreporter):
    """What failed and then passed is a bug somewhere: it is shown as a failure is. Then what tests have given to
    record_property("figures", ...), a line each."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"RAN AGAIN: {report.nodeid} failed at first ({report.when})", "=")
        terminalreporter.write_line(report.longreprtext)
    figures = {
        report.nodeid: [value for name, value in report.user_properties if name == "figures"]
        for report in terminalreporter.stats.get("passed", [])
    }
    if any(figures.values()):
        terminalreporter.section("measured on the way", "-")
        for test, said in figures.items():
            if said:
                terminalreporter.write_line(f"{test}: {', '.join(said)}")


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and len(reporter.stats.get("rerun", [])) > MOST_RERUN and session.exitstatus == 0:
        reporter.write_line(f"more than {MOST_RERUN} tests failed at first", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_pools = {}  # world size -> RankPool


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Ranks serve the tests of a folder: a process with torch in it takes half a gigabyte, and there are some
    twenty."""
    if nextitem is not None and nextitem.path.parent == item.path.parent:
        return
    if (spawn := sys.modules.get("ecosystem.spawn")) is not None:
        spawn.close_all()
    for pool in _pools.values():
        pool.ask_to_end()
    wrong = [problem for problem in [pool.close() for pool in _pools.values()] if problem]
    _pools.clear()
    assert not wrong, "ranks that did not end well:\n" + "\n".join(wrong)


@pytest.fixture
def ranks(request, backend):
    """The RankPool of this test's world size."""
    if request.param not in _pools:
        _pools[request.param] = RankPool(request.param, backend)
    return _pools[request.param]
