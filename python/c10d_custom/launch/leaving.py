"""How a rank that mpirun started, and that has lost another, takes its leave of the launcher without MPI_Finalize,
which waits for all ranks, one that is gone among them (ranks of torchrun: mpi_job.py).

Launchers take a rank that ends without it for one that has failed, and end the others, amid whatever they do. What
libmpi tells the launcher in Finalize is therefore told by itself: by the protocol of MPICH's (PMI-1, "finalize"), or by
PMIx_Finalize of the library that Open MPI has loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select

from .mapped import mapped_files

_SECONDS = 2.0  # for the launcher on this host to answer


def hydra() -> int | None:
    """The descriptor by which Hydra, MPICH's launcher and Intel MPI's, hears of this process; None: it did not start
    it."""
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["PMI_FD"]) if "MPI_LOCALNRANKS" in os.environ else None
    return None


def tell_launcher() -> None:
    """Nothing, where this launcher has no such way. MPI is of no use to this process afterwards."""
    if (fd := hydra()) is not None:
        with contextlib.suppress(OSError):
            _finish_pmi(fd)
    elif "PMIX_NAMESPACE" in os.environ and (paths := mapped_files(r"/.*/libpmix\.so[^/]*")):
        pmix = ctypes.CDLL(paths[0])
        with contextlib.suppress(AttributeError):
            while pmix.PMIx_Initialized() and pmix.PMIx_Finalize(None, ctypes.c_size_t(0)) == 0:
                pass  # once for each PMIx_Init


def _finish_pmi(fd: int) -> None:
    os.write(fd, b"cmd=finalize\n")
    if select.select([fd], [], [], _SECONDS)[0]:
        os.read(fd, 1024)  # finalize_ack
