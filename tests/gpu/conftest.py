"""Tests that need a GPU. Without one they are skipped; --device cpu runs their bodies on CPU tensors instead, --device
simulated on a simulated GPU."""

import os
from pathlib import Path

import pytest
import torch

from conformance.cases import check

from .selection import chosen, run_cases_on, time_for

HERE = Path(__file__).resolve().parent


def lacking(kind):
    """Why these tests cannot be as they are asked for; None if they can."""
    return None if kind != "cuda" or torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(config, items):
    if reason := lacking(config.getoption("device")):
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device(request, tmp_path_factory):
    """ "cuda", or "cpu" or "simulated" to try the tests where there is no GPU."""
    os.environ.setdefault("C10D_TEST_KERNELS", str(tmp_path_factory.mktemp("kernels")))  # host_gpu.py's
    return request.config.getoption("device")


@pytest.fixture
def needs_queues(device):
    """For tests of what a device without streams cannot have."""
    if device != "cuda":
        pytest.skip("only a GPU has streams")


@pytest.fixture
def conform(ranks, device, full):
    """conform(perform, sections, reducing): cases of the table that the CPU is held to, on this device."""

    def run(perform, sections, reducing=False):
        cases = chosen(perform.__name__, sections, reducing, full, ranks.world_size)
        check(ranks, run_cases_on, device, perform, cases, timeout=time_for(cases))

    return run
