"""Several hosts on one machine, for tests of jobs that cross a network: see hosts.py and mpi.py."""

from .hosts import Hosts

__all__ = ["Hosts"]
