"""The program's own MPI_Finalize ends the groups over hosts, which MPI connects: any call of MPI's after it would end
the process without a word."""

from __future__ import annotations

from ..transport.hosts.transport import HierarchicalTransport
from .issuing import live


def end_groups_over_hosts() -> None:
    for group in live():
        transport = group.cpu_transport
        if isinstance(transport, HierarchicalTransport):
            transport.mpi_finalized = True
            group.shutdown()
