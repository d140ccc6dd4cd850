"""What the native core needs to call MPI itself: functions of the library that mpi4py has loaded, and
requests as that library has them (backend/hosts/leader_all_reduce.h)."""

import ctypes
from ctypes import addressof, c_char, c_int, c_void_p, memmove

from ... import native
from ...native import lib
from .link import NOTHING, Buffer

STATUS_BYTES = 64  # at least sizeof(MPI_Status) of any MPI


def _address(function):
    return ctypes.cast(function, c_void_p).value


class MpiCalls:
    """MPI_Startall and MPI_Testall as addresses. Where they cannot be had, they lead to mpi4py's."""

    def __init__(self, MPI):
        self.MPI = MPI
        self._lists = {}
        library = ctypes.CDLL(MPI.__file__)  # its symbols, and those of the MPI it is linked with
        if hasattr(library, "MPI_Startall") and hasattr(library, "MPI_Testall"):
            self.startall, self.testall = _address(library.MPI_Startall), _address(library.MPI_Testall)
            return
        start = ctypes.CFUNCTYPE(c_int, c_int, c_void_p)(self._start)
        test = ctypes.CFUNCTYPE(c_int, c_int, c_void_p, ctypes.POINTER(c_int), c_void_p)(self._test)
        self._keep = start, test
        self.startall, self.testall = _address(start), _address(test)

    def array(self, requests):
        """The requests' handles, as MPI wants them. Persistent requests keep theirs."""
        each = self.MPI._sizeof(self.MPI.Request)
        handles = (c_char * max(1, each * len(requests)))()
        for i, request in enumerate(requests):
            memmove(addressof(handles) + i * each, self.MPI._addressof(request), each)
        self._lists[addressof(handles)] = requests, handles
        return addressof(handles)

    def forget(self, at):
        self._lists.pop(at, None)

    def _start(self, count, at):
        try:
            self.MPI.Prequest.Startall(self._lists[at][0])
            return 0
        except self.MPI.Exception:
            return 1

    def _test(self, count, at, done, statuses):
        try:
            done[0] = self.MPI.Request.Testall(self._lists[at][0])
            return 0
        except self.MPI.Exception:
            return 1


class Progress:
    """Lets MPI make progress while a thread waits in the native core: transfers of most MPIs only move
    while their owner is inside MPI, and two ranks that each wait for a local rank whose data the other
    is to send would wait for ever."""

    def __init__(self, link, calls, handle):
        MPI = link.MPI
        self._calls = calls  # owns the handles' memory
        self._buffer = Buffer(64)
        # From this very rank, which sends no such thing.
        self._request = link.comm.Irecv([self._buffer.memory, MPI.BYTE], link.rank, NOTHING)
        self._status = (c_char * STATUS_BYTES)()
        self.request = calls.array([self._request])
        self._idle = native.Idle(calls.testall, self.request, addressof(self._status))
        lib.c10d_set_elsewhere(handle, _address(lib.c10d_mpi_progress), addressof(self._idle))

    def close(self):
        """The native group is closed by now."""
        self._request.Cancel()
        self._request.Wait()
