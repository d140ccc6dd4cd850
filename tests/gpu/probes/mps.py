"""Do kernels of two processes run side by side, as clients of an MPS daemon of our own?"""

import os
import subprocess
import sys
import threading
import time

from gpu.mps import NOT_RUN, daemon

CLOCKS = 50_000_000
BUSY = 0.5


def spinner():
    """In a process of its own: how long work of one thread takes that alone takes BUSY, once told to begin."""
    import torch

    torch.cuda.synchronize()
    for _ in range(2):  # the first also loads
        began = time.monotonic()
        torch.cuda._sleep(CLOCKS)
        torch.cuda.synchronize()
    rate = CLOCKS / (time.monotonic() - began)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    torch.cuda._sleep(int(BUSY * rate))
    torch.cuda.synchronize()
    print(time.monotonic() - began, flush=True)


def together(environment=None):
    """How long it takes in two processes at once."""
    command, pipe = [sys.executable, __file__, "spinner"], subprocess.PIPE
    both = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **(environment or {})})
        for _ in range(2)
    ]
    guard = threading.Timer(12, lambda: [p.kill() for p in both])
    guard.start()
    try:
        if any(p.stdout.readline() != "ready\n" for p in both):
            raise OSError("a process ended before it began")
        for p in both:
            p.stdin.write("\n")
            p.stdin.flush()
        said = [p.stdout.readline() for p in both]
        if not all(said):
            raise OSError("no answer within 12 s")
        return max(map(float, said))
    finally:
        guard.cancel()
        for p in both:
            p.kill()
            p.wait()


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
    sys.exit(spinner() if sys.argv[1:] else main())
