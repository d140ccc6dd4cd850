"""Can an MPS daemon of our own, in a folder of its own, serve processes that share a GPU? No setting of the GPU is
touched."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from c10d_custom.doctor.probes.gpu import Gpu
from c10d_custom.doctor.probes.run import Probe, ask

BUSY = 0.5
NOT_RUN = 3


@contextlib.contextmanager
def daemon():
    """Environment variables for clients of an MPS daemon that ends with the block; OSError where there can be none."""
    if not (control := shutil.which("nvidia-cuda-mps-control")):
        raise OSError("nvidia-cuda-mps-control is not there")
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in environment.values():
        os.mkdir(path)
    everything = {**os.environ, **environment}
    try:
        started = subprocess.run([control, "-d"], env=everything, text=True, capture_output=True, timeout=10)
        if started.returncode:
            raise OSError(f"it ended with {started.returncode}: {(started.stderr or started.stdout).strip()}")
        try:
            yield environment
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit\n", env=everything, text=True, capture_output=True, timeout=5)
    except subprocess.TimeoutExpired:
        raise OSError("it did not start within 10 s") from None
    finally:
        for log in sorted((folder / "log").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}")
        shutil.rmtree(folder, ignore_errors=True)


def spinner(p):
    """Both processes begin at the same time; how long half a second of one thread's work takes beside the other's."""
    stream = p.gpu.stream()
    p.say()
    p.hear()
    began = time.monotonic()
    p.gpu.spin(stream, BUSY)
    p.gpu.settle(stream)
    p.tell("together", time.monotonic() - began)


def together(environment=None):
    found = ask(Probe("MPS", (spinner, spinner), ("together",), environment=environment or {}), Gpu, 12)
    if "together" not in found.answers:
        raise OSError(found.remarks["together"])
    return found.answers["together"]


def main():
    try:
        print(f"without MPS, {BUSY} s of one thread's work in two processes at once takes {together():.2f} s")
        with daemon() as environment:
            seconds = together(environment)
    except OSError as error:
        print(f"NOT RUN: no MPS daemon: {error}")
        return NOT_RUN
    print(f"SUMMARY: as clients of an MPS daemon of ours {seconds:.2f} s")
    return int(seconds > 1.5 * BUSY)


if __name__ == "__main__":
    sys.exit(main())
