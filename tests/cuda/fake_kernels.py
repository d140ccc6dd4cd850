"""The fused kernels of a simulated GPU: two pieces of work on the stream, between which a rank waits until all
ranks' streams have come as far, or gives up as backend/cuda/p2p.h does.

Of tensors that are read where they lie nothing is staged; the second reads them, and a third, for which a rank waits
likewise until all have come to their second, writes the results.

The first stages inputs in the half that is this call's, the second takes or folds what ranks have staged. Between
the two, ranks are ordered by their arrivals alone: what a rank does after it is not ordered with what another
rank's second piece still reads, as on real GPUs. Signals are kept here, not in the pads; calls and failures in
the pads, which must therefore be zero before.
"""

import ctypes
import time

from c10d_custom import dtypes
from c10d_custom.native import lib
from c10d_custom.transport.cuda import p2p

PREMUL_SUM = int(dtypes.RedOp.PREMUL_SUM)
_WORDS = 64  # bytes of a pad that this model uses
_CALLS, _REPORTED, _FAILED, _OWNER = 0, 12, 16, 24  # in a pad
_ABORT, _ENDED = 8, 16  # in a record


def _u32(address):
    return ctypes.c_uint32.from_address(address)


def _u64(address):
    return ctypes.c_uint64.from_address(address)


class FakeKernels:
    def __init__(self, driver):
        self.driver, self.world = driver, driver.world
        self.compiled = set()
        self.processors = 132
        self.launched = []  # (algorithm, dtype, redop)
        self.halves = []  # of each, the bytes of a half; 0: of tensors that are read where they lie

    def reduce(self, *arguments):
        self.driver.reduce(*arguments)

    def function(self, algorithm, dtype, redop):
        key = algorithm, dtype.code, redop
        with self.world.lock:
            if key not in self.compiled:
                self.driver._called("compile")
                self.compiled.add(key)
        return key

    def half_of(self, number, half):
        return (number & 1) * half

    def has(self, algorithm, dtype, redop):
        return (algorithm, dtype.code, redop) in self.compiled

    def launch(self, function, stream, blocks, threads, arguments):
        copy = p2p.Arguments.from_buffer_copy(arguments)
        if self.driver.is_capturing:
            if stream != self.driver.current_stream():
                self.world.wrong(f"rank {self.driver.rank} launches on a stream that is not the captured one")
            self.driver.graph.append((function, blocks, threads, copy))
            return
        self.driver._called("launch")
        self.enqueue(stream, function, blocks, threads, copy)

    def enqueue(self, stream, function, blocks, threads, arguments):
        self.launched.append(function)
        self.halves.append(arguments.half)
        with self.world.lock:
            kernel = _Kernel(self.driver, function, blocks, threads, arguments)
            self.driver._enqueue(stream, kernel.first())
            self.driver._enqueue(stream, kernel.second())
            if kernel.lie:
                self.driver._enqueue(stream, kernel.third())


class _Kernel:
    def __init__(self, driver, key, blocks, threads, a):
        self.driver, self.world, self.key, self.a = driver, driver.world, key, a
        self.shape = blocks, threads
        n, self.me = a.ranks, a.rank
        spans = [driver._span(a.pad[r], _WORDS, "fused kernel") for r in range(n)]
        self.lie = a.half == 0
        room = a.bytes * (n if key[0] == "ReduceScatter" else 1) if self.lie else 2 * a.half
        stagings = [driver._span(a.staging[r], room, "fused kernel") for r in range(n)]
        self.pads, self.stagings = [s for s, _ in spans], [s for s, _ in stagings]
        self.staged, self.results = self._plan()
        tensors = [driver._span(address, a.bytes, "fused kernel") for address, _ in self.staged]
        tensors += [driver._span(address, a.bytes, "fused kernel") for address, _, _ in self.results]
        reals = [real for real, _ in tensors]
        self.staged = [(real, at) for real, (_, at) in zip(reals, self.staged)]
        self.results = [(real, *of) for real, (_, *of) in zip(reals[len(self.staged) :], self.results)]
        self.record = a.record
        self.buffers = [b for _, b in spans + stagings + tensors if b]
        if a.record not in self.world.pinned:
            self.world.wrong(f"rank {self.me} launches with a record that is not pinned memory")
        if not 0 < a.timeout_ns < 1 << 62:
            self.world.wrong(f"rank {self.me} launches a kernel that waits for ever")
        if any(real % a.unit for real in reals) or any(at + a.bytes > (a.half or room) for _, at in self.staged):
            self.world.wrong("arguments of a fused kernel that do not fit")
        self.outcome = False  # until it has begun
        self.barrier, self.folded = 0, []
        self.owns = False  # its rank's pad
        if not a.token:
            self.world.wrong(f"rank {self.me} launches a kernel without a token")

    def _plan(self):
        """([(address of an input, where in the half it is staged)], [(address of an output, whose staging, where in the
        half)]): of one rank's it is a copy, of all it is folded."""
        a, algorithm, everyone = self.a, self.key[0], range(self.a.ranks)
        if algorithm == "AllGather":
            taken = [(a.part[r], [r], 0) for r in everyone if a.part[r] != a.input]
            return [(a.input, 0)], taken
        if algorithm == "ReduceScatter":
            return [(a.part[r], r * a.slice) for r in everyone], [(a.output, everyone, a.rank * a.slice)]
        if algorithm == "Broadcast":
            return ([(a.input, 0)], []) if a.rank == a.root else ([], [(a.output, [a.root], 0)])
        return [(a.input, 0)], [(a.output, everyone, 0)]

    # --- the protocol, in the words of p2p.h

    def _told(self):
        if _u64(self.pads[self.me] + _FAILED).value:
            self._report(p2p.PEER, _u64(self.pads[self.me] + _FAILED).value & 0xFFFFFFFF)
            return True
        return False

    def _report(self, kind, peer):
        if _u32(self.pads[self.me] + _REPORTED).value:
            return False
        _u32(self.pads[self.me] + _REPORTED).value = 1
        if self.record in self.world.pinned:
            _u64(self.record).value = kind << 56 | peer << 48 | self.a.number
        return True

    def _give_up(self, kind, peer):
        if self._report(kind, peer):
            gone = _u64(self.record + _ABORT).value if self.record in self.world.pinned else 0
            for rank, pad in enumerate(self.pads):
                if not gone >> rank & 1:
                    _u64(pad + _FAILED).value = kind << 32 | self.me
        return False

    def _signal(self, rank):
        if self.world.flags_lost and rank != self.me:
            return None
        return self.world.signals.get((self.pads[rank], self.number, self.barrier))

    def _arrive(self, clock):
        self.world.signals[(self.pads[self.me], self.number, self.barrier)] = (
            self.a.fingerprint,
            self.a.factor,
            dict(clock),
            self.shape,
            self.key,
        )

    def first(self):
        def run(clock):
            self.number = _u32(self.pads[self.me] + _CALLS).value
            owner = _u32(self.pads[self.me] + _OWNER)
            if owner.value not in (0, self.a.token):
                self._give_up(p2p.AT_ONCE, self.me)
                return
            self.owns, owner.value = True, self.a.token
            self.half = self.driver.fused.half_of(self.number, self.a.half)
            _u32(self.pads[self.me] + _CALLS).value = self.number + 1
            self.began = time.monotonic()
            if self._told():
                return
            self.outcome = None
            for source, at in () if self.lie else self.staged:
                target = self.stagings[self.me] + self.half + at
                self._touches(target, True, clock)
                ctypes.memmove(target, source, self.a.bytes)
            self._arrive(clock)

        op = self.world.op(
            "fused kernel",
            run=run,
            reads=[(p, _WORDS) for p in self.pads] + [(source, self.a.bytes) for source, _ in self.staged],
            buffers=self.buffers,
        )
        op.kernel = self
        return op

    def _decided(self):
        """Whether the wait is over; sets ``outcome``: whether all came."""
        if self.outcome is not None:
            return True
        signals = [self._signal(r) for r in range(self.a.ranks)]
        for rank, signal in enumerate(signals):
            if signal is not None and signal[0] != self.a.fingerprint:
                self.outcome = self._give_up(p2p.MISMATCH, rank)
                return True
        if all(signals):
            self.outcome = True
        elif self._told():
            self.outcome = False
        elif self.record in self.world.pinned and _u64(self.record + _ABORT).value:
            self.outcome = self._give_up(p2p.ABORTED, self.me)
        elif (time.monotonic() - self.began) * 1e9 > self.a.timeout_ns:
            self.outcome = self._give_up(p2p.TIMEOUT, signals.index(None))
        return self.outcome is not None

    def _waits(self):
        clock = {}
        for rank in range(self.a.ranks) if self.outcome else ():
            for component, tick in self._signal(rank)[2].items():
                clock[component] = max(clock.get(component, 0), tick)
        return clock

    def _end(self):
        if self.owns:
            _u32(self.pads[self.me] + _OWNER).value = 0
            if self.record in self.world.pinned:
                _u64(self.record + _ENDED).value = self.number + 1
        for target, *_ in () if self.outcome else self.results:
            ctypes.memset(target, 0xD5, self.a.bytes)  # garbage

    def _last(self, ready, run):
        op = self.world.op(
            "fused kernel",
            ready=ready,
            run=run,
            waits=self._waits,
            writes=[(target, self.a.bytes) for target, _, _ in self.results],
            buffers=self.buffers,
        )
        op.kernel = self
        return op

    def third(self):
        def run(clock):
            self._end()
            for target, data in self.folded if self.outcome else ():
                ctypes.memmove(target, data, self.a.bytes)

        return self._last(self._decided, run)

    def second(self):
        def run(clock):
            if not self.lie:
                self._end()
            if not self.outcome:
                return
            signals = [self._signal(r) for r in range(self.a.ranks)]
            if any(s[3:] != (self.shape, self.key) for s in signals):
                self.world.wrong("ranks launch a fused kernel with different grids or algorithms")
            for target, ranks, at in self.results:
                sources = [self.stagings[r] + self.half + at for r in ranks]
                for source in sources:
                    self._touches(source, False, clock)
                if self.key[0] in ("AllGather", "Broadcast"):
                    data = ctypes.string_at(sources[0], self.a.bytes)
                else:
                    data = self._fold(sources, [s[1] for s in signals])
                if self.lie:
                    self.folded.append((target, data))
                else:
                    ctypes.memmove(target, data, self.a.bytes)
            if self.lie:
                self.barrier, self.outcome = 1, None
                self._arrive(clock)

        op = self._last(self._decided, run)
        if self.lie:
            op.writes = []
        return op

    def _touches(self, address, write, clock):
        """Staging memory: said when it is, as only then it is known which half it is."""
        stream = next(s for s in self.world.streams if s.number == self.stream)
        label = f"a fused kernel of rank {self.me}"
        self.world._access((address, self.a.bytes), write, self.stream, stream.clock[self.stream], clock, label)

    def _fold(self, sources, factors):
        _, code, redop = self.key
        dtype, n = dtypes.BY_CODE[code], len(sources)
        factors = factors if redop == PREMUL_SUM else []
        result = ctypes.create_string_buffer(self.a.bytes)
        if lib.c10d_reduce(
            code,
            redop,
            result,
            (ctypes.c_void_p * n)(*sources),
            n,
            self.a.bytes // dtype.item_bytes,
            (ctypes.c_double * len(factors))(*factors) if factors else None,
        ):
            self.world.wrong(f"a fused reduction of {dtype.name} with {redop}, which there is not")
        return result
