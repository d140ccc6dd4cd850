"""No package (no __init__.py): it would be named cuda, as NVIDIA's is."""

import pytest

import host_kernels
from c10d_custom.transport.cuda import transport as cuda_transport
from fake_world import World

FAULTS = ("test_deaths", "test_device_faults", "test_fused_faults", "test_surroundings", "test_waits")


def pytest_generate_tests(metafunc):
    """With --full, tests of faults run under both models of a dead process's events; those of them that turn on it
    do so always."""
    name = metafunc.module.__name__
    if metafunc.config.getoption("full") and name in FAULTS and "dead_events_pass" not in metafunc.fixturenames:
        metafunc.fixturenames.append("of_dead_events")
        metafunc.parametrize("of_dead_events", [True, False], ids=["dead_passes", "dead_never"], indirect=True)


@pytest.fixture
def of_dead_events(request, monkeypatch):
    monkeypatch.setattr(World, "DEAD_EVENTS_PASS", request.param)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Ranks that are threads, on a machine that is busy, need longer to close their groups than processes do."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 60.0)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return host_kernels.build(tmp_path_factory.mktemp("kernels") / "kernels.so", ["Reduce", "OneShot", "TwoShot"])
