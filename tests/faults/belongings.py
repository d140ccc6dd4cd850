"""What a process holds that a group could have left."""

import ctypes
import gc
import os


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


def own_bytes():
    """Memory that is this process's alone, what malloc keeps for later left out."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as f:
        fields = dict(line.split(":") for line in f.read().splitlines()[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))
