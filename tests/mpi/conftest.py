"""Lets --backend, where the suite defines it, choose the backend of this folder too."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _backend_option(request):
    chosen = request.config.getoption("--backend", default=None)
    if chosen:
        os.environ["C10D_TEST_BACKEND"] = chosen
