"""What ranks may have left in /dev/shm."""

import os

_OF_OTHERS = "mpich_shm_", "sm_segment.", "sem.mp-", "psm_"  # MPI's, multiprocessing's


def in_dev_shm():
    """The files' names, but for those that MPI jobs and multiprocessing make: tests that run beside this one use both,
    and ranks that use neither make neither."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_OTHERS)}
