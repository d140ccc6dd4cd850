"""Outlives the check, whatever ends that: then ends its processes, and removes its folder of temporary files.

python -m gpu.check.guard MARK     prints the folder, and waits for the end of its standard input
"""

import shutil
import signal
import sys
import tempfile

from harness.marks import kill_marked


def main(mark):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="gpu-check-")
    try:
        print(folder, flush=True)
        sys.stdin.buffer.read()
    finally:
        kill_marked(mark)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
