"""Can an MPS daemon of our own, in a folder of its own, serve processes that share a GPU? No setting of the GPU is
touched.

python -m gpu.probes.mps                 # the probe
python -m gpu.probes.mps COMMAND...      # run a command whose processes are clients of such a daemon
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .pair import NOT_RUN, Pair, probe

BUSY = 0.5


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
        started = subprocess.run([control, "-d"], env=everything, text=True, capture_output=True, timeout=15)
        if started.returncode:
            raise OSError(f"it ended with {started.returncode}: {(started.stderr or started.stdout).strip()}")
        try:
            yield environment
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit\n", env=everything, text=True, capture_output=True, timeout=15)
    except subprocess.TimeoutExpired:
        raise OSError("it did not start within 15 s") from None
    finally:
        for log in sorted((folder / "log").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}")
        shutil.rmtree(folder, ignore_errors=True)


def spinner(pipe):
    """Both processes begin at the same time; how long half a second of one thread's work takes beside the other's."""
    from .calls import Gpu

    gpu = Gpu()
    pipe.send("ready")
    pipe.recv()
    began = time.monotonic()
    gpu.spin(BUSY)
    gpu.stream.synchronize()
    return time.monotonic() - began


def together():
    pair = Pair(spinner, spinner)
    try:
        return max(pair.result(0), pair.result(1))
    finally:
        pair.end()


def body():
    print(f"without MPS, {BUSY} s of one thread's work in two processes at once takes {together():.2f} s")
    try:
        with daemon() as environment:
            os.environ.update(environment)
            seconds = together()
    except OSError as error:
        print(f"NOT RUN: no MPS daemon: {error}")
        raise SystemExit(NOT_RUN) from None
    print(f"as clients of an MPS daemon of ours {seconds:.2f} s")
    return [] if seconds < 1.5 * BUSY else ["the two processes' kernels did not run at the same time under MPS"]


def run(command):
    try:
        with daemon() as environment:
            return subprocess.run(command, env={**os.environ, **environment}).returncode
    except OSError as error:
        print(f"NOT RUN: no MPS daemon: {error}")
        return NOT_RUN


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:])) if sys.argv[1:] else probe(body)
