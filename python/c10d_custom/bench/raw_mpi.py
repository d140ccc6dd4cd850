"""MPI's own collectives on the tensors' memory, by mpi4py: one flat communicator of all ranks, in rank order."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .case import REDUCING, ROOTED, Reference, Unavailable, name_of, there_and_back
from .ranks import launched
from .windows import neighbours

if TYPE_CHECKING:
    from .case import Case
    from .operations import Buffers


_REDOPS = {"SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}

_NAMES = {"broadcast": "Bcast", "reduce_scatter": "Reduce_scatter_block"}  # of the others: as Allreduce


def version() -> str | None:
    """ "MPICH 5.0.2", of the MPI library in this process, whoever loaded it; None without one."""
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is None:
        return None
    vendor, number = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, number))}"


class RawMpi(Reference):
    def __init__(self) -> None:
        if not launched():
            raise Unavailable(
                "the ranks of raw MPI must be mpirun's, or torchrun's on several hosts: "
                "mpirun -n 2 python -m c10d_custom bench --against mpi"
            )
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
            raise Unavailable(f"raw MPI needs mpi4py and an MPI library (pip install mpi4py mpich): {error}") from error
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if MPI.COMM_WORLD.size != dist.get_world_size():
            raise Unavailable(
                f"MPI counts {MPI.COMM_WORLD.size} ranks where this job has {dist.get_world_size()}: "
                f"is mpirun that of the library mpi4py found, {version()}?"
            )
        self.MPI, self.comm = MPI, MPI.COMM_WORLD.Split(0, dist.get_rank())

    def barrier(self) -> None:
        self.comm.Barrier()

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.operation in REDUCING and case.redop not in _REDOPS:
            raise Unavailable(f"MPI has no reduction {case.redop}")
        bound = {"windows": self._windows, "send_recv": self._send_recv}.get(case.operation, self._collective)
        return bound(case, self._array(case, buffers.source), self._array(case, buffers.target))

    def _array(self, case: Case, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        if case.operation not in REDUCING:
            return tensor.view(torch.uint8).numpy()
        try:
            return tensor.numpy()
        except TypeError:
            raise Unavailable(f"MPI cannot reduce {name_of(case.dtype)}") from None

    def _call(self, case: Case, name: str, *args: Any, **options: Any) -> Callable[[], object]:
        if not case.asynchronous:
            return partial(getattr(self.comm, name), *args, **options)
        start = partial(getattr(self.comm, "I" + name.lower()), *args, **options)
        return lambda: start().Wait()

    def _collective(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        options = {"op": getattr(self.MPI, _REDOPS[case.redop or ""])} if case.operation in REDUCING else {}
        if case.operation in ROOTED:
            options["root"] = case.root
        place = self.MPI.IN_PLACE
        buffers = {
            "all_reduce": (place, target),
            "broadcast": (target,),
            "reduce": (place, target) if case.rank == case.root else (target, None),
        }.get(case.operation, (source, target))
        name = _NAMES.get(case.operation) or case.operation.replace("_", "").capitalize()
        return self._call(case, name, *buffers, **options)

    def _windows(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """By MPI's one-sided operations, passive targets: data, then a count beside it."""
        (to, of), token = neighbours(case), target if case.rank else source
        comm: Any = self.comm
        come, one = array("q", [0]), array("q", [1])
        data, counts = (self.MPI.Win.Create(memory, comm=comm) for memory in (target, come))
        for window in (data, counts):
            window.Lock_all()
        times = 0

        def send() -> None:
            data.Put(token, to)
            data.Flush(to)
            counts.Accumulate(one, to, op=self.MPI.SUM)
            counts.Flush(to)

        def await_one() -> None:
            nonlocal times
            times += 1
            while come[0] < times:
                self.comm.Iprobe(of)  # moves on what others do here
                counts.Sync()

        return there_and_back(case.rank, send, await_one)

    def _send_recv(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        if case.rank not in (0, case.size - 1):
            return lambda: None
        peer = case.size - 1 - case.rank
        send, recv = self._call(case, "Send", target, peer), self._call(case, "Recv", target, peer)
        return there_and_back(case.rank, send, recv)
