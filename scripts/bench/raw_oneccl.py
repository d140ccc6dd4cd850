"""oneCCL's own collectives on the tensors' memory, through its C API: one communicator of all ranks, in rank order,
over Intel's MPI.

Without an mpirun it would go through libfabric, and take milliseconds: its threads then want cores of their own.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from c10d_custom.bench.case import REDUCING, Reference, Unavailable, name_of, there_and_back
from c10d_custom.bench.ranks import first_said, under_mpi

if TYPE_CHECKING:
    from c10d_custom.bench.case import Case
    from c10d_custom.bench.operations import Buffers


_LIBRARY = "libccl.so.2"
_INSTALL = "pip install 'oneccl<2022.2'"
_FIND = "LD_LIBRARY_PATH=" + sysconfig.get_path("data") + "/lib"
_BYTE = 1
# oneapi/ccl/v2/types.h
_DTYPES = {
    torch.int8: 0,
    torch.uint8: _BYTE,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_REDOPS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}


class _UniqueId(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * 4096)]


_SETTINGS = {"CCL_PLUGIN": "ONECCL_LEGACY_CPU", "CCL_LOG_LEVEL": "error"}


def _library() -> ctypes.CDLL:
    roots = [os.environ.get("CCL_ROOT"), sysconfig.get_path("data")]
    files = [str(f) for root in roots if root and (f := Path(root, "lib", _LIBRARY)).exists()]
    return ctypes.CDLL((files or [_LIBRARY])[0])


class RawOneCcl(Reference):
    def __init__(self) -> None:
        if not under_mpi():
            raise Unavailable(
                f"oneCCL's ranks must be those of Intel's mpirun, which comes with it ({_INSTALL}): "
                "mpirun -n 2 python scripts/bench sweep --against oneccl"
            )
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        why, key = None, _UniqueId()
        try:
            self.lib = _library()
            self.lib.onecclGetErrorString.restype = ctypes.c_char_p
            if dist.get_rank() == 0:
                self._checked("onecclGetUniqueId")(ctypes.byref(key))
        except (OSError, RuntimeError) as error:
            why = f"oneCCL needs its libraries ({_INSTALL}, and {_FIND}): {error}"
        if why := first_said(why):  # whoever could would wait for the others
            raise Unavailable(why)
        dist.broadcast(torch.frombuffer(key, dtype=torch.uint8), src=0)
        self.comm = ctypes.c_void_p()
        size, rank = ctypes.c_size_t(dist.get_world_size()), ctypes.c_int(dist.get_rank())
        self._checked("onecclCommInitRank")(ctypes.byref(self.comm), size, key, rank)

    def _checked(self, name: str) -> Any:
        if (function := getattr(self.lib, name, None)) is None:  # they grow in number from version to version
            raise Unavailable(f"this version of oneCCL has no {name}")
        function.restype = self._result
        return function

    def _result(self, code: int) -> None:
        if code:
            raise RuntimeError(f"oneCCL: {self.lib.onecclGetErrorString(code).decode()}")

    def barrier(self) -> None:
        dist.barrier()

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.asynchronous or not hasattr(self, case.operation):
            raise Unavailable(f"oneCCL's C API has no {'asynchronous calls' if case.asynchronous else case.operation}")
        if case.operation in REDUCING and not (case.dtype in _DTYPES and case.redop in _REDOPS):
            raise Unavailable(f"oneCCL has no {case.redop} of {name_of(case.dtype)}")
        return getattr(self, case.operation)(case, buffers.source, buffers.target)

    def _call(self, name: str, buffers: tuple[Any, ...], case: Case, count: int, *rest: int) -> Callable[[], object]:
        """``buffers`` are the function's first arguments; ``count`` elements, ``rest`` what comes after the dtype."""
        code, items = (_DTYPES[case.dtype], 1) if case.dtype in _DTYPES else (_BYTE, case.dtype.itemsize)
        where = [ctypes.c_void_p(None if b is None else b.data_ptr()) for b in buffers]
        ints = [ctypes.c_int(value) for value in (code, *rest)]
        call = partial(self._checked(name), *where, ctypes.c_size_t(count * items), *ints, self.comm, None)

        def kept(keep: object = buffers) -> None:
            call()

        return kept

    def all_reduce(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        return self._call("onecclAllReduce", (target, target), case, case.count, _REDOPS[case.redop or ""])

    def broadcast(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        return self._call("onecclBroadcast", (target, target), case, case.count, case.root)

    def reduce(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        return self._call("onecclReduce", (target, target), case, case.count, _REDOPS[case.redop or ""], case.root)

    def all_gather(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        return self._call("onecclAllGather", (source, target), case, source.numel())

    def reduce_scatter(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        redop = _REDOPS[case.redop or ""]
        return self._call("onecclReduceScatter", (source, target), case, target.numel(), redop)

    def all_to_all(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        return self._call("onecclAllToAll", (source, target), case, source.numel() // case.size)

    def scatter(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        return self._call("onecclScatter", (source, target), case, target.numel(), case.root)

    def send_recv(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        if case.rank not in (0, case.size - 1):
            return lambda: None
        peer = case.size - 1 - case.rank
        send, recv = (self._call(name, (target,), case, case.count, peer) for name in ("onecclSend", "onecclRecv"))
        return there_and_back(case.rank, send, recv)
