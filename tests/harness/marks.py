"""Know a command's processes by a mark in their environment, and end them.

Process groups alone do not do: torchrun and MPI's launchers put workers in sessions of their own, and a worker
whose launcher was killed is nobody's child. Processes of emulated hosts are found too.
"""

import os
import signal
import time

MARK = "C10D_TEST_COMMAND"


def marked(mark):
    """Processes, zombies excepted, whose environment at exec carried the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as f:
                if wanted in f.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue
    return found


def kill_marked(mark, spare=None):
    """Kill them all, but not the process of this id: one that ends by itself, having reaped the others."""
    for _ in range(20):
        left = [pid for pid in marked(mark) if pid != spare]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
