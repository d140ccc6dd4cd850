"""No package (no __init__.py): it would be named cuda, as NVIDIA's is."""

import pytest

import host_kernels
from c10d_custom.transport.cuda import transport as cuda_transport
from gpu import one_gpu


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Ranks that are threads, on a machine that is busy, need longer to close their groups than processes do."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 60.0)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Of what reduces as OneShot does, fewer pairs."""
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    fewer = dict.fromkeys(host_kernels.FUSED[2:], one_gpu.PAIRS)
    return host_kernels.build(path, ["Reduce", "OneShot", "TwoShot"], fewer=fewer)
