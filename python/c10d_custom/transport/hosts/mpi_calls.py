"""What the native core needs to call MPI itself: functions of the library that mpi4py has loaded, and
requests as that library has them (backend/hosts/leader_all_reduce.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, c_char, memmove
from typing import TYPE_CHECKING, Any

from ...native import address_of, over_hosts
from ...native.over_hosts import lib
from .link import NOTHING, Buffer

if TYPE_CHECKING:
    from mpi4py.MPI import Request

    from .link import MpiLink


STATUS_BYTES = 64  # at least sizeof(MPI_Status) of any MPI


class MpiCalls:
    """MPI_Startall and MPI_Testall as addresses: symbols of mpi4py, or of the MPI that it is linked with."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI
        self._handles: dict[int, ctypes.Array[c_char]] = {}  # by their address
        library = ctypes.CDLL(MPI.__file__)
        self.startall, self.testall = address_of(library.MPI_Startall), address_of(library.MPI_Testall)

    def array(self, requests: Sequence[Request]) -> int:
        """The address of the requests' handles, as MPI wants them. Persistent requests keep theirs."""
        each = self.MPI._sizeof(self.MPI.Request)
        handles = (c_char * max(1, each * len(requests)))()
        for i, request in enumerate(requests):
            memmove(addressof(handles) + i * each, self.MPI._addressof(request), each)
        self._handles[addressof(handles)] = handles
        return addressof(handles)

    def forget(self, at: int) -> None:
        self._handles.pop(at, None)


class Progress:
    """Lets MPI make progress while a thread waits in the native core: transfers of most MPIs only move
    while their owner is inside MPI, and two ranks that each wait for a local rank whose data the other
    is to send would wait for ever."""

    def __init__(self, link: MpiLink, calls: MpiCalls, handle: int) -> None:
        MPI = link.MPI
        self._calls = calls  # owns the handles' memory
        self._buffer = Buffer(64)
        # From this very rank, which sends no such thing.
        self._request = link.comm.Irecv([self._buffer.memory, MPI.BYTE], link.rank, NOTHING)
        self._status = (c_char * STATUS_BYTES)()
        self.request = calls.array([self._request])
        self._idle = over_hosts.Idle(calls.testall, self.request, addressof(self._status))
        lib.c10d_set_elsewhere(handle, address_of(lib.c10d_mpi_progress), addressof(self._idle))

    def close(self) -> None:
        """Ends the request of MPI; the native group is closed by now."""
        self._request.Cancel()
        self._request.Wait()
