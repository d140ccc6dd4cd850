"""Where the native core calls MPI itself, through the functions of the library that mpi4py has loaded
(backend/mpi/direct.h): the shortest way of a small all_reduce, and progress while the core waits."""
import ctypes
import os
import re
from ctypes import byref, c_char, c_int32, c_uint32, c_void_p, memmove

from ..errors import TransportError
from . import native
from .mpi import NOTHING, Buffer
from .native import DirectReduce, lib

# Payloads are sent as one of these lengths, for each of which there are requests.
_LENGTHS = (64, 1024, 4096, 16384)
_STATUS_BYTES = 64     # at least sizeof(MPI_Status) of any MPI
_NATIVE_SECONDS = 2e-3  # in the core, before Python looks at the group's health


def mpi_library():
    """The MPI library of this process, for its symbols; None if it cannot be told."""
    with open("/proc/self/maps") as maps:
        paths = dict.fromkeys(m.group(0) for m in re.finditer(r"/\S*/libmpi(?:_abi)?\.so\S*", maps.read()))
    for path in paths:
        try:
            library = ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_LAZY)
            library.MPI_Startall, library.MPI_Testall
            return library
        except (OSError, AttributeError):
            continue
    return None


class Progress:
    """Lets MPI make progress while a thread waits in the native core: transfers of most MPIs only move
    while their owner is inside MPI, and two ranks that each wait for a local rank whose data the other
    is to send would wait for ever."""

    def __init__(self, link, library, handle):
        MPI = link.MPI
        if library is None:
            self._callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: link.comm.Iprobe(MPI.ANY_SOURCE, NOTHING))
            lib.c10d_set_elsewhere(handle, ctypes.cast(self._callback, c_void_p), None)
            return
        self._buffer = Buffer(64)
        # From this very rank, which sends no such thing.
        self._request = link.comm.Irecv([self._buffer.memory, MPI.BYTE], link.rank, NOTHING)
        self._status = (c_char * _STATUS_BYTES)()
        self._idle = native.Idle(_address(library.MPI_Testall), MPI._addressof(self._request),
                                 ctypes.addressof(self._status))
        lib.c10d_set_elsewhere(handle, _address(lib.c10d_mpi_progress), ctypes.addressof(self._idle))

    def close(self):
        """The native group is closed by now."""
        if hasattr(self, "_request"):
            self._request.Cancel()
            self._request.Wait()


def _address(function):
    return ctypes.cast(function, c_void_p).value


class Quick:
    """For the Direct of a group. `all_reduce` is for sizes up to `limit`."""

    def __init__(self, direct, link, hosts, library):
        self._direct, self._link = direct, link
        slots = [b.address for b in direct.slots]
        counts = [len(h) for h in hosts.ranks]
        members = [r for h in hosts.ranks for r in h]
        self._keep = [(c_void_p * len(slots))(*slots), (c_uint32 * len(members))(*members),
                      (c_uint32 * len(counts))(*counts), (c_void_p * len(counts))(*[b.address for b in direct.partials])]
        peers = link.size - 1
        self._statuses = (c_char * (2 * peers * _STATUS_BYTES))()
        self._args = native.Direct(_address(library.MPI_Startall),
                                   _address(library.MPI_Testall),
                                   ctypes.addressof(self._statuses), link.size, link.rank, len(counts), 0, *self._keep)
        self._sets = {}   # length -> (the requests' handles as MPI has them, the requests)
        self._calls = {}  # (dtype, redop, length) -> DirectReduce
        self._peer = c_int32()
        self.limit = direct.limit

    def all_reduce(self, number, address, count, dtype, redop, deadline):
        """In place, of ``count`` items at ``address``."""
        nbytes = count * dtype.item_bytes
        length = next(n for n in _LENGTHS if nbytes <= n)
        call = self._calls.get((dtype.code, redop, length)) or self._make(dtype, redop, length)
        head = call.head
        head.number, head.count, head.payload = number, count, nbytes
        call.data = address
        status = lib.c10d_direct_reduce(self._args, call, int(_NATIVE_SECONDS * 1e9), byref(self._peer))
        if status == native.PENDING:
            self._link.wait(self._sets[length][1], deadline, self._direct.peers)
            status = lib.c10d_direct_finish(self._args, call, byref(self._peer))
        while status == native.MISMATCH:
            self._direct.again(number, self._peer.value, deadline)
            status = lib.c10d_direct_finish(self._args, call, byref(self._peer))
        if status:
            raise TransportError("MPI failed in a direct all_reduce")

    def _make(self, dtype, redop, length):
        if length not in self._sets:
            self._sets[length] = self._requests(length)
        steps = self._direct.steps(dtype, redop)
        handles, requests = self._sets[length]
        call = DirectReduce(native.Head(0, 2, redop, dtype.code, -1, 0, 0, 0.0), None, steps.inside.redop,
                            steps.between.redop, steps.inside.factors, steps.between.factors,
                            ctypes.addressof(handles), len(requests))
        self._calls[dtype.code, redop, length] = call
        return call

    def _requests(self, length):
        requests = self._direct.receives + self._direct.persistent_sends(length)
        MPI = self._link.MPI
        each = MPI._sizeof(MPI.Request)
        handles = (c_char * (each * len(requests)))()
        for i, request in enumerate(requests):
            memmove(ctypes.addressof(handles) + i * each, MPI._addressof(request), each)
        return handles, requests
