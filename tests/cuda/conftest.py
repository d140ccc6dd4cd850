"""No package (no __init__.py): it would be named cuda, as NVIDIA's is."""

import pytest

import host_kernels


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return host_kernels.build(tmp_path_factory.mktemp("kernels") / "kernels.so", ["Reduce", "OneShot", "TwoShot"])
