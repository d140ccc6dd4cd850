"""What ranks may have left in /dev/shm."""

import os


def in_dev_shm():
    """The files' names, but for those of MPI jobs, which may run beside a test whose own ranks use no MPI."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("mpich_shm_", "sm_segment."))}
