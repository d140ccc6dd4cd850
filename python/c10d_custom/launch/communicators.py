"""How communicators are made: with a deadline, which MPI has not; and of which ranks, after a loss.

MPICH makes one of any ranks of the job that are alive. Open MPI does over hosts only from a communicator without lost
ranks, which it makes by its fault tolerance (ULFM), if that was asked for when the job was started."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import TransportError
from ..native import over_hosts
from ..threads import start

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from .mpi_job import Job

_SLICE = 20e-3  # s: between two looks at who is alive

_left: Any = None  # the ranks of this process's job that are left, once some were left out


def is_open_mpi(MPI: Any) -> bool:
    return "open mpi" in MPI.Get_library_version().lower()


def create(job: Job, ranks: Sequence[int], tag: int, seconds: float, check: Callable[[], None]) -> Intracomm:
    """Of those ranks in COMM_WORLD, in this order; collective over them. ``check``: called now and then, and may
    raise."""

    def make() -> Any:
        everyone = job.world.Get_group()
        members = everyone.Incl(ranks)
        made = (job.world if _left is None else _left).Create_group(members, tag)
        members.Free()
        everyone.Free()
        over_hosts.lib.c10d_transfer_begins()  # the last of it may still be here
        return made

    return _bounded(make, f"made no communicator of ranks {list(ranks)}", seconds, check)


def leave_out_the_lost(job: Job, seconds: float, check: Callable[[], None]) -> None:
    """From now on `create` makes communicators of the ranks that are alive. With Open MPI this is collective over all
    of those (it shrinks COMM_WORLD); other libraries need nothing for it."""
    global _left
    if is_open_mpi(job.MPI):
        left = _bounded(job.world.Shrink, "did not leave out the lost ranks", seconds, check)
        left.Set_errhandler(job.MPI.ERRORS_RETURN)
        _left = left


def _bounded(make: Callable[[], Any], failure: str, seconds: float, check: Callable[[], None]) -> Any:
    # Where a rank dies meanwhile, it may never return.
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:
            made.append(error)

    deadline = time.monotonic() + seconds
    thread = start(run, "c10d_custom:create")
    while not made and (left := deadline - time.monotonic()) > 0:
        thread.join(min(_SLICE, left))
        if not made:
            check()
    if not made:
        raise TransportError(f"group creation: MPI {failure} in time")
    if isinstance(made[0], Exception):
        raise TransportError(f"group creation: MPI {failure}: {made[0]}") from made[0]
    return made[0]
