"""How a rank that mpirun started takes its leave of the launcher without MPI_Finalize, which waits for all ranks, one
that is gone among them: under Hydra at every exit, under others where a rank is lost (ranks of torchrun: mpi_job.py).

Launchers take a rank that ends without it for one that has failed, and end the others, amid whatever they do. What
libmpi tells the launcher in Finalize is therefore told by itself: by the protocol of MPICH's (PMI-1, "finalize"), or by
PMIx_Finalize of the library that Open MPI has loaded."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os

from .. import native
from ..native import over_hosts
from ..threads import select
from . import mapped_files

_PATIENCE = 2.0  # s: for the launcher on this host to answer


def hydra() -> int | None:
    """The descriptor by which Hydra, MPICH's launcher and Intel MPI's, hears of this process; None: it did not start
    it."""
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["PMI_FD"]) if "MPI_LOCALNRANKS" in os.environ else None
    return None


def abort_at_exit() -> None:
    """Of a rank in which MPI cannot start. Hydra takes no note of the end of one that it has never heard, and the
    others, which wait for it in MPI_Init, would wait for ever."""
    if (fd := hydra()) is not None:
        atexit.register(_abort, fd)


def _abort(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, b"cmd=init pmi_version=1 pmi_subversion=1\n")
        if select.select([fd], [], [], _PATIENCE)[0]:
            os.read(fd, 1024)
        os.write(fd, b"cmd=abort exitcode=1\n")


def addresses(library: ctypes.CDLL | None, *names: str) -> list[int]:
    """Returns the addresses of these functions of ``library``; 0 for one that it does not have."""
    return [native.address_of(getattr(library, name, None)) for name in names]


def pmix() -> list[int]:
    """The addresses of PMIx_Initialized and PMIx_Finalize; 0: no launcher hears of this process by them."""
    paths = mapped_files(r"/.*/libpmix\.so[^/]*") if "PMIX_NAMESPACE" in os.environ else []
    return addresses(ctypes.CDLL(paths[0]) if paths else None, "PMIx_Initialized", "PMIx_Finalize")


def tell_launcher() -> None:
    """Tells the launcher that this rank ends in good order, as MPI_Finalize would: by PMI under Hydra, by PMIx under
    Open MPI's; any other is told nothing. MPI is of no use to this process afterwards."""
    if (fd := hydra()) is not None:
        over_hosts.lib.c10d_tell_hydra(fd)
    else:
        over_hosts.lib.c10d_tell_pmix(*pmix())
