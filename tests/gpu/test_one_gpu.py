"""The fused kernels, all ranks' on one GPU, in a process of their own (one_gpu.py); also under compute-sanitizer, where
that is installed. --device simulated (or cpu) takes kernels built for the host."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import one_gpu

TESTS = Path(__file__).resolve().parents[1]
PARTS = list(one_gpu.PARTS)
_SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
_FOUND_ERRORS = 86


@pytest.fixture(scope="module")
def given(device):
    """Arguments of one_gpu.py."""
    if device == "cuda":
        return []
    import host_gpu  # which one_gpu.py has put in reach

    return ["--library", str(host_gpu.library())]


def run(arguments, before=(), seconds=120):
    """Its own process group of CUDA's settings: as many hardware queues as ranks, and nothing loaded while kernels
    wait."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TESTS))))
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "PYTHONPATH": path}
    return subprocess.run(
        [*before, sys.executable, "-m", "gpu.one_gpu", *arguments],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_right_and_never_waiting_for_ever(given, device, size):
    out = run([*given, "--ranks", str(size), *([] if device == "cuda" else ["--few"])])
    print(out.stdout)
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stdout.count("calls right") == len(PARTS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
def test_nothing_for_the_sanitizer(given, device, tool, size):
    """racecheck is not among them: it looks at shared memory, of which the kernels have none. A sanitizer may run
    kernels one after the other: then those of several ranks give up at their deadline, in good order."""
    if device != "cuda" or _SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed, or there is no GPU for it")
    tool = [_SANITIZER, "--tool", tool, "--error-exitcode", str(_FOUND_ERRORS)]
    out = run([*given, "--ranks", str(size), "--few", "--part", "bits", "--within", "10"], tool)
    print(out.stdout)
    if size > 1 and "Failure(kind=1" in out.stderr and "ERROR SUMMARY: 0 errors" in out.stdout:
        pytest.skip(
            "the sanitizer runs kernels one after the other: those of several ranks gave up, and without an error"
        )
    assert out.returncode == 0, out.stdout + out.stderr
