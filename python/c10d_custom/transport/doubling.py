"""A small all_reduce: recursive doubling in two rounds, one inside each host and one between hosts, both by
MPI, in one call of the native core (backend/mpi/direct.h).

Its messages begin as those of direct.py, and go with the same tag, so that a rank that calls something
else is found out by those that hear from it.
"""
from ctypes import addressof, c_char, c_void_p, memmove

from ..call import Op
from ..errors import TransportError
from . import native
from .direct import HEAD_BYTES, announced
from .mpi import HEAD, Buffer
from .mpi_native import STATUS_BYTES
from .native import DirectReduce, Head, lib

# Payloads are sent as one of these lengths, for each of which there are requests.
_LENGTHS = (64, 1024, 4096, 16384, 65536)
_SLICE_NS = 2_000_000  # in the core, before Python looks at the group's health


class _Round:
    """Messages with ``peers``: this rank's goes to ``to`` and it has one from each of ``sources``. ``slots``
    are the buffers of all, this rank's own being ``own``."""

    def __init__(self, link, calls, slots, own, sources, to):
        self._link, self._calls, self._own, self._to = link, calls, slots[own], to
        self.slots = slots
        self.pointers = (c_void_p * len(slots))(*[s.address for s in slots])
        others = [s for i, s in enumerate(slots) if i != own]
        self.sources = sources
        self.receives = [link.comm.Recv_init([s.memory, link.MPI.BYTE], p, HEAD) for s, p in zip(others, sources)]
        self._sets = {}
        self.by_slot = dict(zip((i for i in range(len(slots)) if i != own), sources))

    def requests(self, length):
        """(address of the handles, requests) that send ``length`` bytes of payload."""
        if length not in self._sets:
            message = [self._own.memory[:HEAD_BYTES + length], self._link.MPI.BYTE]
            requests = self.receives + [self._link.comm.Send_init(message, p, HEAD) for p in self._to]
            self._sets[length] = self._calls.array(requests), requests
        return self._sets[length]


class Doubling:
    """``limit``: bytes of the largest tensor."""

    def __init__(self, link, calls, hosts, direct, limit):
        self._link, self._direct = link, direct
        self.limit = limit
        mine, local, width = hosts.mine, hosts.local, len(hosts.here)

        def buffers(count):
            return [Buffer(HEAD_BYTES + limit) for _ in range(count)]

        peers = [r for r in hosts.here if r != hosts.rank]
        self._inside = _Round(link, calls, buffers(width), local, peers, peers)
        self._between = _Round(
            link, calls, buffers(len(hosts.ranks)), mine, [hosts.partner(h, local) for h in hosts.others],
            [r for h in hosts.others for i, r in enumerate(hosts.ranks[h]) if i % width == local])
        most = 2 * max(link.size, 2)
        self._statuses = (c_char * (most * STATUS_BYTES))()
        self._args = native.Direct(
            calls.startall, calls.testall, addressof(self._statuses), self._inside.pointers, self._between.pointers,
            width, len(hosts.ranks), local, mine)
        self._calls = {}

    def run(self, number, call, deadline):
        tensor, result = call.inputs[0], call.outputs[0]
        if tensor.data_ptr() != result.data_ptr():
            memmove(result.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        self.all_reduce(number, result.data_ptr(), call.count, tensor.nbytes, call, deadline, call.factor, announced(call))

    def all_reduce(self, number, address, count, nbytes, kind, deadline, factor=0.0, op=Op.all_reduce):
        """In place, of ``count`` items, ``nbytes``, at ``address``. ``kind``: has their ``dtype`` and the ``redop``.
        ``factor``: this rank's, of PREMUL_SUM."""
        for length in _LENGTHS:
            if nbytes <= length:
                break
        length = min(length, self.limit)
        call = self._calls.get((kind.dtype.code, kind.redop, length, op)) or self._make(kind, length, op)
        head = call.head
        head.number, head.count, head.payload, head.factor = number, count, nbytes, factor
        call.data, call.stage = address, 0
        while status := lib.c10d_direct_reduce(self._args, call, _SLICE_NS):
            inside = call.stage <= 2
            now = self._inside if inside else self._between
            if status == native.MISMATCH:
                self._direct.again(number, now.by_slot[call.peer], now.slots[call.peer], deadline)
            elif status == native.PENDING:
                self._link.look(now.requests(length)[1], deadline, now.sources)
            else:
                raise TransportError("MPI failed in a small all_reduce")

    def _make(self, kind, length, op):
        dtype, redop = kind.dtype, kind.redop
        steps = self._direct.steps(dtype, redop)
        inside, between = self._inside.requests(length), self._between.requests(length)
        call = DirectReduce(Head(0, op, redop, dtype.code, -1, 0, 0, 0.0), None, steps.inside.factors,
                            steps.between.factors, inside[0], between[0], steps.inside.redop, steps.between.redop,
                            len(inside[1]), len(between[1]))
        self._calls[dtype.code, redop, length, op] = call
        return call
