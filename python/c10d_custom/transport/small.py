"""A small all_reduce over several hosts, by MPI alone, in one call of the native core (backend/mpi/direct.h).

Up to 4 KiB in two rounds, as recursive doubling does it: each rank exchanges its input with the ranks of its host, and
then its host's result with one rank of each other host. Above, each host's first rank, its leader, gathers and reduces
the inputs of its host, exchanges the result with the other leaders and hands out what comes of it: a round more, but
the network carries each host's result once to each other host.

The messages begin as those of direct.py, and go with the same tag, so that a rank that calls something
else is found out by those that hear from it.
"""
from ctypes import addressof, c_char, c_uint32, c_void_p, memmove

from ..call import Op
from ..errors import TransportError
from . import native
from .direct import HEAD_BYTES, announced
from .mpi import HEAD, Buffer
from .mpi_native import STATUS_BYTES
from .native import DirectReduce, Head, lib

# Payloads are sent as one of these lengths, for each of which there are requests.
_LENGTHS = (64, 1024, 4096, 16384, 65536)
_SHORT = 4096           # bytes: without leaders
_SLICE_NS = 2_000_000  # in the core, before Python looks at the group's health


class _Round:
    """Messages that are waited for together: one from each of ``sources``, into ``slots``, and ``own`` to each of ``to``."""

    def __init__(self, link, calls, sources, slots, own, to):
        self._link, self._calls, self._own, self._to = link, calls, own, to
        self.sources, self.slots = sources, slots
        self.peers = sources or to
        self._receives = [link.comm.Recv_init([s.memory, link.MPI.BYTE], p, HEAD) for s, p in zip(slots, sources)]
        self._sets = {}

    def requests(self, length):
        """(address of the handles, requests) that send ``length`` bytes of payload."""
        if length not in self._sets:
            requests = list(self._receives)
            if self._to:
                message = [self._own.memory[:HEAD_BYTES + length], self._link.MPI.BYTE]
                requests += [self._link.comm.Send_init(message, p, HEAD) for p in self._to]
            self._sets[length] = self._calls.array(requests), requests
        return self._sets[length]


class _Way:
    """What a rank does. ``rounds``: with the ranks of its host, with those of others, and handing out the result; only the
    first for who has a leader. ``out``: what is sent in the first or third. ``results``: the hosts'."""

    def __init__(self, calls, statuses, hosts, rounds, out, results, leads):
        self.rounds = rounds
        self._keep = [(c_void_p * max(1, len(buffers)))(*[b.address for b in buffers]) for buffers in (rounds[0].slots, results)]
        self.args = native.Direct(calls.startall, calls.testall, addressof(statuses), *self._keep, out.address,
                                  len(rounds[0].slots), len(results), hosts.local if leads else 0, hosts.mine, leads)


class SmallAllReduce:
    """``limit``: bytes of the largest tensor."""

    def __init__(self, link, calls, hosts, direct, limit):
        self._link, self._direct = link, direct
        self.limit = limit
        self._statuses = (c_char * (2 * max(link.size, 2) * STATUS_BYTES))()
        self._mpi = calls
        self._long = self._leaders(hosts)
        self._short = self._all(hosts)
        self._calls = {}

    def _buffers(self, count):
        # With room for what a rank sends that takes the other way, since it calls something else.
        return [Buffer(HEAD_BYTES + self.limit) for _ in range(count)]

    def _between(self, hosts, sources, to):
        results = self._buffers(len(hosts.ranks))
        slots = [results[h] for h in hosts.others]
        return results, _Round(self._link, self._mpi, sources, slots, results[hosts.mine], to)

    def _all(self, hosts):
        out, *slots = self._buffers(len(hosts.here))
        peers, width, local = [r for r in hosts.here if r != hosts.rank], len(hosts.here), hosts.local
        # On a host with more ranks than here one rank may have several that hear from it.
        results, between = self._between(hosts, [hosts.partner(h, local) for h in hosts.others], [
            r for h in hosts.others for i, r in enumerate(hosts.ranks[h]) if i % width == local])
        rounds = _Round(self._link, self._mpi, peers, slots, out, peers), between
        return _Way(self._mpi, self._statuses, hosts, rounds, out, results, True)

    def _leaders(self, hosts):
        leader, *others = hosts.here
        if hosts.rank != leader:
            out, slot = self._buffers(2)
            rounds = _Round(self._link, self._mpi, [leader], [slot], out, [leader]),
            return _Way(self._mpi, self._statuses, hosts, rounds, out, [], False)
        out, *slots = self._buffers(len(hosts.here))
        leaders = [hosts.ranks[h][0] for h in hosts.others]
        results, between = self._between(hosts, leaders, leaders)
        rounds = (_Round(self._link, self._mpi, others, slots, None, []), between,
                  _Round(self._link, self._mpi, [], [], out, others))
        return _Way(self._mpi, self._statuses, hosts, rounds, out, results, True)

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
        way = self._short if length <= _SHORT else self._long
        call = self._calls.get((kind.dtype.code, kind.redop, length, op)) or self._make(kind, length, op, way)
        head = call.head
        head.number, head.count, head.payload, head.factor = number, count, nbytes, factor
        call.data, call.stage = address, 0
        while status := lib.c10d_direct_reduce(way.args, call, _SLICE_NS):
            now = way.rounds[(call.stage - 1) // 2]
            if status == native.MISMATCH:
                self._direct.again(number, now.sources[call.peer], now.slots[call.peer], deadline)
            elif status == native.PENDING:
                self._link.look(now.requests(length)[1], deadline, now.peers)
            else:
                raise TransportError("MPI failed in a small all_reduce")

    def _make(self, kind, length, op, way):
        dtype, redop = kind.dtype, kind.redop
        steps = self._direct.steps(dtype, redop)
        sets = [r.requests(length) for r in way.rounds]
        call = DirectReduce(Head(0, op, redop, dtype.code, -1, 0, 0, 0.0), None, steps.inside.factors,
                            steps.between.factors, (c_void_p * 3)(*[s[0] for s in sets]),
                            (c_uint32 * 3)(*[len(s[1]) for s in sets]),
                            steps.inside.redop, steps.between.redop)
        self._calls[dtype.code, redop, length, op] = call
        return call
