"""Runs a command as a client of an MPS daemon of its own, in a folder of its own: python -m gpu.mps DEVICE COMMAND...

No setting of the GPU is touched. DEVICE: cuda, or cpu, where there is no daemon."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

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


def main(device, *command):
    with contextlib.ExitStack() as stack:
        try:
            more = stack.enter_context(daemon()) if device == "cuda" else {}
        except OSError as error:
            print(f"NOT RUN: no MPS daemon: {error}")
            return NOT_RUN
        process = subprocess.Popen(command, env={**os.environ, **more})
        signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))  # the check's, at a part's limit
        return process.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
