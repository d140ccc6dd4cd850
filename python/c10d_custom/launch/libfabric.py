"""MPI over libfabric, which MPICH has beside UCX, and Intel's and Cray's MPI alone: what is set for it, and the thread
that drives it (backend/hosts/mpi_driver.h)."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
from typing import Any

from .. import native
from ..native import over_hosts
from . import mapped_files


def is_used(version: str) -> bool:
    """Whether that library of MPI, by all that MPI_Get_library_version says, sends by libfabric."""
    if "Intel" in version or "CRAY" in version:
        return True
    # As it was configured: "ch4:ucx ofi", of which the first is taken unless the environment names another.
    layers = re.search(r"Device:\s*ch4:([\w, ]+)", version)
    return layers is not None and _chosen(re.split(r"[, ]+", layers[1].strip())) == "ofi"


def _chosen(layers: list[str]) -> str:
    named = next(filter(None, (os.environ.get(f"{prefix}_CH4_NETMOD") for prefix in _PREFIXES)), "")
    return named if named in layers else layers[0]


_PREFIXES = "MPIR_CVAR", "MPIR_PARAM", "MPICH"


def prepare(version: str) -> None:
    """Before MPI starts: tells libfabric how, where the environment does not say."""
    if not is_used(version):
        return
    # Over TCP, MPICH prefers the older provider, "sockets", on which it ends processes whose peer is gone.
    if version.startswith("MPICH") and _has_tcp():
        os.environ.setdefault("FI_PROVIDER", "^sockets")
    # After so many messages that no receive waits for (64), or a longer one, the other provider, "tcp", reads no more
    # of what that rank sends; but which of them the program receives first is its own choice.
    os.environ.setdefault("FI_TCP_MAX_SAVED", str(1 << 30))
    os.environ.setdefault("FI_TCP_MAX_SAVED_SIZE", str(1 << 30))


def _has_tcp() -> bool:
    for library in mapped_files(r"/.*/lib(fabric|mpi|mpi_abi)\.so[^/]*"):
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"xnet_") >= 0:
                return True
    return False


class Driver(ctypes.Structure):
    """See backend/hosts/mpi_driver.h."""

    _fields_ = [
        ("iprobe", ctypes.c_void_p),
        ("comm", ctypes.c_ssize_t),
        ("source", ctypes.c_int64),
        ("tag", ctypes.c_int64),
    ]


def drive(MPI: Any) -> None:
    """From now on what this process has sent leaves, whatever the program does. (Only while it calls MPI, where there
    is no such thread to be had.)"""
    iprobe = native.address_of(getattr(ctypes.CDLL(MPI.__file__), "MPI_Iprobe", None))
    if MPI.COMM_WORLD.size < 2 or not iprobe or not is_used(MPI.Get_library_version()):
        return
    how = Driver(iprobe, MPI._handleof(MPI.COMM_WORLD), MPI.ANY_SOURCE, MPI.ANY_TAG)
    over_hosts.lib.c10d_drive_mpi(ctypes.byref(how))
    MPI.Finalize = functools.partial(_finalize, MPI.Finalize)


def stop() -> None:
    """Stops the calls of MPI. Called before MPI ends, since nobody may call it afterwards."""
    over_hosts.lib.c10d_end_mpi_driver()


def _finalize(own: Any) -> None:
    stop()
    own()
