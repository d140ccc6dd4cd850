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


def tell_launcher() -> None:
    """Nothing, where this launcher has no such way. MPI is of no use to this process afterwards."""
    if "MPI_LOCALNRANKS" in os.environ and "PMI_FD" in os.environ:  # Hydra: MPICH's, Intel MPI's
        with contextlib.suppress(OSError, ValueError):
            _finish_pmi(int(os.environ["PMI_FD"]))
    elif "PMIX_NAMESPACE" in os.environ and (paths := mapped_files(r"/.*/libpmix\.so[^/]*")):
        pmix = ctypes.CDLL(paths[0])
        with contextlib.suppress(AttributeError):
            while pmix.PMIx_Initialized() and pmix.PMIx_Finalize(None, ctypes.c_size_t(0)) == 0:
                pass  # once for each PMIx_Init


def _finish_pmi(fd: int) -> None:
    os.write(fd, b"cmd=finalize\n")
    if select.select([fd], [], [], _SECONDS)[0]:
        os.read(fd, 1024)  # finalize_ack
