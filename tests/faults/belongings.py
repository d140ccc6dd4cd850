"""What a process holds that a group could have left."""

import ctypes
import gc
import os
import time

IDLE = 1.0  # s: threads that nobody needs end then (backend/shm/crew.cpp, threads.py)


def belongings():
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:c10d_custom" in line for line in maps)
    # Listing a folder takes a descriptor: one for each.
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": mapped,
    }


def belongings_after(before):
    """The same, once it is what there was before or idle threads have had the time to end."""
    until = time.monotonic() + IDLE + 1
    while (held := belongings()) != before and time.monotonic() < until:
        time.sleep(0.02)
    return held


def own_bytes():
    """Memory that is this process's alone, what malloc keeps for later left out."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as f:
        fields = dict(line.split(":") for line in f.read().splitlines()[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))
