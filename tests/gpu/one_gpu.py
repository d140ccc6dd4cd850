"""The fused kernels of several ranks on one GPU, in one process: a stream, flags, staging memory and tensors for each
rank, at the addresses that all have in common. So one GPU is enough to run them.

    python -m gpu.one_gpu --ranks 4 --part bits        (parts: PARTS below)

All ranks' blocks must run at once. A grid has so few that each finds a processor of its own; a driver that runs the
ranks' kernels one after the other makes them give up at their deadline, which is an error here, and nothing worse.
With --library (kernels built for the host by tests/cuda/host_kernels.py) threads of the host are ranks, streams and
device threads.
"""

import argparse
import ctypes
import functools
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "cuda"))

from c10d_custom import dtypes
from c10d_custom.call import REDUCING, Op, Region
from c10d_custom.call import Call as Collective
from c10d_custom.transport.cuda import algorithm, compiler, p2p
from c10d_custom.transport.cuda.kernels import PREMUL_SUM
from engine import engine, same

WITHIN = 30.0  # seconds in which kernels must end that have nothing to wait for
GUARD = 256
FAILED = 16  # Pad::failed
PAIRS = [
    (dtypes.BY_DTYPE[getattr(torch, name)], code)
    for name, ops in {
        "bool": ("BXOR",),
        "int8": ("SUM", "MIN"),
        "int32": ("SUM", "BAND"),
        "int64": ("AVG", "PRODUCT"),
        "float16": ("SUM", "AVG"),
        "bfloat16": ("SUM", "PREMUL_SUM", "MAX"),
        "float8_e4m3fn": ("SUM",),
        "float32": ("SUM", "AVG", "PREMUL_SUM", "MIN"),
        "float64": ("SUM",),
        "complex64": ("SUM", "PRODUCT"),
    }.items()
    for code, op in dtypes.REDUCE_OPS.items()
    if op in ops
]
OPS = Op.all_reduce, Op.all_gather, Op.reduce_scatter, Op.broadcast
FLOAT, SUM = dtypes.BY_DTYPE[torch.float32], int(dtypes.RedOp.SUM)


class Gpu:
    """Bytes: up to ``flagged``, words have flags; up to ``shot``, a call is one-shot; up to ``half``, one kernel."""

    flagged, shot, half, threads = 64 << 10, 128 << 10, 256 << 10, 512

    def __init__(self, ranks):
        from cupy.cuda import Device, Stream, runtime

        from c10d_custom.transport.cuda.kernels import Kernels

        self._runtime, self.kernels = runtime, Kernels(0)
        algorithms = *p2p.ALL_REDUCE, "ReduceScatter"
        texts = [compiler.text_of([(a, *pair)]) for a in algorithms for pair in PAIRS]
        texts += [compiler.text_of([(algorithm, *p2p.MOVED)]) for algorithm in ("AllGather", "Broadcast")]
        with ThreadPoolExecutor(8) as pool:  # into the cache on disk
            list(pool.map(compiler.compiled, texts, [Device(0).compute_capability] * len(texts)))
        self._streams = [Stream(non_blocking=True) for _ in range(ranks)]
        self.blocks = max(1, min(p2p.MAX_BLOCKS, self.kernels.processors // ranks))

    def zeros(self, nbytes):
        address = self._runtime.malloc(nbytes)
        self._runtime.memset(address, 0, nbytes)
        return address

    def record(self):
        return self._runtime.hostAlloc(p2p.RECORD_BYTES, self._runtime.hostAllocPortable)

    def write(self, address, data):
        self._runtime.memcpy(address, data.data_ptr(), data.nbytes, self._runtime.memcpyHostToDevice)

    def read(self, address, nbytes):
        data = torch.empty(nbytes, dtype=torch.uint8)
        self._runtime.memcpy(data.data_ptr(), address, nbytes, self._runtime.memcpyDeviceToHost)
        return data

    def launch(self, rank, work):
        work(self._streams[rank].ptr)

    def launch_beside(self, rank, work):
        """On another stream of the rank's."""
        from cupy.cuda import Stream

        self._streams.append(Stream(non_blocking=True))
        work(self._streams[-1].ptr)

    def settled(self, seconds):
        """Whether all that was launched ends in that time. Waits without a call of CUDA's that has no deadline."""
        until = time.monotonic() + seconds
        while not all(stream.done for stream in self._streams):
            if time.monotonic() > until:
                return False
            time.sleep(1e-4)
        return True


class Host:
    """A rank's kernels run in the order of their launches, on a thread."""

    flagged, shot, half, threads, blocks = 128, 256, 2048, 3, 2

    def __init__(self, ranks, library):
        from host_kernels import HostKernels

        self.kernels = HostKernels(library)
        self._keep, self._queues = [], [[] for _ in range(ranks)]
        self._threads = [None] * ranks
        self._lock = threading.Lock()

    def zeros(self, nbytes):
        self._keep.append(torch.zeros(nbytes + 256, dtype=torch.uint8))
        address = self._keep[-1].data_ptr()
        return address + -address % 256

    def record(self):
        return self.zeros(p2p.RECORD_BYTES)

    def write(self, address, data):
        ctypes.memmove(address, data.data_ptr(), data.nbytes)

    def read(self, address, nbytes):
        data = torch.empty(nbytes, dtype=torch.uint8)
        ctypes.memmove(data.data_ptr(), address, nbytes)
        return data

    def launch(self, rank, work):
        with self._lock:
            self._queues[rank].append(work)
            if self._threads[rank] is None:
                self._threads[rank] = threading.Thread(target=self._run, args=(rank,), daemon=True)
                self._threads[rank].start()

    def launch_beside(self, rank, work):
        self._threads.append(thread := threading.Thread(target=work, args=(0,), daemon=True))
        thread.start()

    def _run(self, rank):
        while True:
            with self._lock:
                if not self._queues[rank]:
                    self._threads[rank] = None
                    return
                work = self._queues[rank].pop(0)
            work(0)

    def settled(self, seconds):
        until = time.monotonic() + seconds
        while any(thread is not None and thread.is_alive() for thread in self._threads):
            if time.monotonic() > until:
                return False
            time.sleep(1e-3)
        return True


class Ranks:
    """All that the ranks have on ``device``. ``end[rank]``: a P2p."""

    within = WITHIN

    def __init__(self, device, size):
        algorithm.FLAGGED_BYTES, algorithm.one_shot_bytes = device.flagged, lambda ranks: device.shot
        self.device, self.size = device, size
        self.pads = pads = [device.zeros(p2p.pad_bytes(size)) for _ in range(size)]
        stagings = [device.zeros(2 * device.half) for _ in range(size)]
        self.end = []
        for rank in range(size):
            record = device.record()
            ctypes.memset(record, 0, p2p.RECORD_BYTES)
            self.end.append(
                p2p.P2p(
                    *(device.kernels, rank, pads, stagings, 2 * device.half, record, device.blocks, device.threads),
                    locate=lambda call: call.lie,
                )
            )

    def launch(self, call, ranks=None, seconds=None):
        """Kernels of a Call, of these ranks (None: all), which wait up to ``seconds`` (None: ``within``) for each
        other."""
        for rank in range(self.size) if ranks is None else ranks:
            self.end[rank].prepare(call.asked(rank))
            self.device.launch(rank, functools.partial(call.enqueue, self.end[rank], rank, seconds or self.within))

    def settle(self):
        assert self.device.settled(WITHIN), "kernels do not end"

    def failures(self):
        return [end.failure() for end in self.end]


class Call:
    """Inputs of all ranks, and places for their outputs with guards around them, ``off`` bytes past a multiple of 16;
    ``in_place``: an output of each rank is its input, or one of them; ``lie``: what ranks give is read where it lies,
    if it can be. ``count``: of each tensor; ``other``: ranks that
    have one more. ``number``: by which failures call it."""

    def __init__(
        self, ranks, dtype, redop, count, rng, off=0, in_place=False, other=None, op=Op.all_reduce, number=0, lie=False
    ):
        size = self.size = ranks.size
        self.device, self.dtype, self.redop, self.op = ranks.device, dtype, redop, op
        self.counts = [count] * size
        for rank in other or ():
            self.counts[rank] += 1
        self.root = rng.randrange(size) if op is Op.broadcast else 0
        self.number = number
        self.factors = [rng.choice([0.3, -1.5, 2.0]) for _ in range(size)] if redop == PREMUL_SUM else []
        if op in (Op.all_gather, Op.broadcast):
            self.factors = []
        self.nbytes, self._off = count * dtype.item_bytes, GUARD + off
        room = max(self.counts) * dtype.item_bytes + 2 * GUARD
        self._guard = torch.full((room,), 0xA5, dtype=torch.uint8)
        self._data, self._inputs, self._outputs, self._lie = [], [], [], []
        for rank, count in enumerate(self.counts):
            data = [
                torch.frombuffer(bytearray(rng.randbytes(max(1, count * dtype.item_bytes))), dtype=torch.uint8)
                for _ in range(size if op is Op.reduce_scatter else 1)
            ]
            inputs, outputs = [self._place() for _ in data], [self._place() for _ in range(self._outputs_of(rank))]
            for place, given in zip(inputs, data):
                ranks.device.write(place + self._off, given)
            if in_place and op is Op.all_reduce:
                outputs = inputs
            elif in_place and op is Op.all_gather:
                outputs[rank] = inputs[0]
            elif in_place and op is Op.reduce_scatter:
                outputs = [inputs[rank]]
            if op is Op.reduce_scatter or (op is Op.all_reduce and not in_place) or off % 16:
                lie = False
            self._lie.append([*inputs, *outputs][0] + self._off)
            self._data.append(data)
            self._inputs.append(inputs)
            self._outputs.append(outputs)

        if not lie:
            self._lie = []

    def _outputs_of(self, rank):
        return {Op.all_gather: self.size, Op.broadcast: int(rank != self.root)}.get(self.op, 1)

    def _place(self):
        place = self.device.zeros(len(self._guard))
        self.device.write(place, self._guard)
        return place

    def asked(self, rank, seconds=WITHIN):
        inputs, outputs = (
            [Region(place + self._off, self.nbytes, self.counts[rank]) for place in places]
            for places in (self._inputs[rank], self._outputs[rank])
        )
        if self.op is Op.broadcast and rank != self.root:
            inputs = []
        count, factor = self.counts[rank], self.factors[rank] if self.factors else 0.0
        more = {"root": self.root, "count": count, "redop": self.redop, "factor": factor}
        made = Collective(self.op, self.op.name, self.dtype, seconds, inputs, outputs, **more)
        made.lie = p2p.Lie(self._lie) if self._lie else None
        return made

    def enqueue(self, end, rank, seconds, stream):
        end.run(stream, self.asked(rank, seconds), self.number)

    def _wanted(self, rank):
        """Of each of its outputs."""
        data = [[d[: self.nbytes] for d in given] for given in self._data]
        if self.op is Op.all_gather:
            return [d[0] for d in data]
        if self.op is Op.broadcast:
            return [data[self.root][0]] * self._outputs_of(rank)
        part = rank if self.op is Op.reduce_scatter else 0
        return [engine(self.dtype, self.redop, [d[part] for d in data], self.counts[0], self.factors)]

    def check(self, what):
        """Every rank's results, bit for bit, and the memory around them."""
        if not self.nbytes:
            return
        for rank, places in enumerate(self._outputs):
            for place, want in zip(places, self._wanted(rank), strict=True):
                got = self.device.read(place, len(self._guard))
                mine = got[self._off : self._off + self.nbytes]
                if self.op in (Op.all_gather, Op.broadcast):
                    problem = None if torch.equal(mine, want) else "other bytes than were given"
                else:
                    problem = same(self.dtype, self.redop, mine, want)
                assert problem is None, f"{what}: rank {rank}: {problem}"
                outside = torch.cat([got[: self._off], got[self._off + self.nbytes :]])
                assert bool((outside == 0xA5).all()), f"{what}: rank {rank} writes beside its output"


def counts_for(device, item):
    """Nothing, one, odd ones; with flags, one-shot, two-shot, several kernels."""
    flagged, shot, half = (nbytes // item for nbytes in (device.flagged, device.shot, device.half))
    return [0, 1, 7, flagged, flagged + 1, shot - 1, shot, shot + 1, half, 2 * half + 77]


def bits(ranks, few):
    """Every pair at every size: the reference's bits."""
    done = 0
    for dtype, redop in PAIRS[::4] if few else PAIRS:
        rng = random.Random(1000 * dtype.code + redop)
        counts = counts_for(ranks.device, dtype.item_bytes)
        some = rng.sample(counts, 3) if few else counts
        ops = [op for op in OPS if op in REDUCING or redop == SUM]  # what only moves has no reduce op
        for i, (op, count) in enumerate([(op, count) for op in ops for count in some]):
            off = rng.choice([0, 0, dtype.item_bytes % 16, 1 if dtype.item_bytes == 1 else dtype.item_bytes % 16])
            few_lie = i == 2  # so few that the last ranks have no share
            lie, off = few_lie or i % 3 == 0, 0 if few_lie else off
            call = Call(ranks, dtype, redop, count, rng, off, in_place=i % 2 == 0, op=op, lie=lie)
            ranks.launch(call)
            ranks.settle()
            what = f"{op.name} of {dtype.name} {dtypes.REDUCE_OPS[redop]}, {count} elements, {off} bytes off"
            assert not any(ranks.failures()), f"{what}: {ranks.failures()}"
            assert not any(end.busy() for end in ranks.end), f"{what}: the hosts do not see that all have ended"
            call.check(what)
            done += 1
    return done


def burst(ranks, few):
    """Calls of all kinds one behind the other, with no host in between: halves and flags used again at once."""
    rng = random.Random(ranks.size)
    calls = []
    for _ in range(8 if few else 40):
        dtype, redop = rng.choice(PAIRS)
        count = rng.choice(counts_for(ranks.device, dtype.item_bytes))
        calls.append(
            Call(
                ranks, dtype, redop, count, rng, in_place=rng.random() < 0.5, op=rng.choice(OPS), lie=rng.random() < 0.3
            )
        )
        for rank in range(ranks.size):  # nothing is compiled or loaded while kernels wait
            ranks.end[rank].prepare(calls[-1].asked(rank))
    for call in calls:
        ranks.launch(call)
    ranks.settle()
    assert not any(ranks.failures()), ranks.failures()
    for i, call in enumerate(calls):
        call.check(f"call {i} of {len(calls)}")
    return len(calls)


def missing(ranks, few):
    """A rank whose kernel does not come: the others end at their deadline, and say whom they waited for."""
    if ranks.size == 1:
        return 0
    rng, away = random.Random(1), ranks.size - 1
    for count in (7, ranks.device.half // 4 + 1):
        fresh = Ranks(ranks.device, ranks.size)
        call = Call(fresh, FLOAT, SUM, count, rng)
        began = time.monotonic()
        fresh.launch(call, range(away), seconds=0.5)
        fresh.settle()
        assert 0.4 < time.monotonic() - began, "they did not wait"
        found = fresh.failures()[:away]
        assert p2p.Failure(p2p.TIMEOUT, away, 0) in found, found
        assert all(found), found
        others = [f for f in found if f != p2p.Failure(p2p.TIMEOUT, away, 0)]
        assert all(f.kind == p2p.PEER and f.peer < away for f in others), found
        # It comes after all: no kernel of the group waits any more.
        fresh.launch(call, seconds=3600.0)
        fresh.settle()
        late = fresh.failures()[away]
        assert late is not None and late.kind == p2p.PEER and fresh.failures()[:away] == found, fresh.failures()
    return 2


def mismatch(ranks, few):
    """Ranks that call different things find out, and end."""
    if ranks.size == 1:
        return 0
    fresh, rng = Ranks(ranks.device, ranks.size), random.Random(1)
    calls = [
        Call(fresh, FLOAT, SUM, 7, rng, number=0),
        Call(fresh, FLOAT, SUM, 7, rng, number=1),
        Call(fresh, FLOAT, SUM, 7, rng, other=[0], number=2),
    ]
    for call in calls:
        fresh.launch(call, seconds=3600.0)
    fresh.settle()
    found = fresh.failures()
    assert {f and f.number for f in found} == {2}, found
    assert any(f is not None and f.kind == p2p.MISMATCH for f in found), found
    assert all(f is not None and f.kind in (p2p.MISMATCH, p2p.PEER) for f in found), found
    return 1


def abort(ranks, few):
    """The host ends the waiting of one rank's kernel, and so of all."""
    if ranks.size == 1:
        return 0
    fresh = Ranks(ranks.device, ranks.size)
    fresh.launch(Call(fresh, FLOAT, SUM, 7, random.Random(1)), range(ranks.size - 1), seconds=3600.0)
    time.sleep(0.2)
    assert not fresh.device.settled(0), "they do not wait"
    fresh.end[0].abort([ranks.size - 1])  # who has not come, and is gone: nothing is written there
    fresh.settle()
    assert not fresh.device.read(fresh.pads[-1] + FAILED, 8).any()
    assert fresh.failures()[0] == p2p.Failure(p2p.ABORTED, 0, 0)
    assert all(f == p2p.Failure(p2p.PEER, 0, 0) for f in fresh.failures()[1:-1]), fresh.failures()
    return 1


def at_once(ranks, few):
    """Two calls of one rank that no stream orders: the second finds the first, and all end."""
    if ranks.size == 1:
        return 0
    rng = random.Random(1)
    for count in (7, ranks.device.half // 4 + 1):
        fresh = Ranks(ranks.device, ranks.size)
        first, second = Call(fresh, FLOAT, SUM, count, rng), Call(fresh, FLOAT, SUM, count, rng)
        fresh.launch(first, range(1), seconds=3600.0)
        time.sleep(0.2)
        enqueue = functools.partial(second.enqueue, fresh.end[0], 0, 3600.0)
        fresh.device.launch_beside(0, enqueue)
        fresh.settle()
        assert fresh.failures()[0] == p2p.Failure(p2p.AT_ONCE, 0, 0), fresh.failures()
        fresh.launch(first, range(1, ranks.size), seconds=3600.0)  # who comes later learns of it
        fresh.settle()
        assert all(f == p2p.Failure(p2p.PEER, 0, 0) for f in fresh.failures()[1:]), fresh.failures()
    return 2


PARTS = {part.__name__: part for part in (bits, burst, missing, mismatch, abort, at_once)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--few", action="store_true", help="fewer pairs and sizes, for slow tools")
    parser.add_argument("--within", type=float, default=WITHIN, help="seconds that kernels wait for each other")
    parser.add_argument("--library", help="kernels built for the host")
    given = parser.parse_args()
    device = Host(given.ranks, ctypes.CDLL(given.library)) if given.library else Gpu(given.ranks)
    ranks = Ranks(device, given.ranks)
    ranks.within = given.within
    for name in given.part or PARTS:
        print(f"{name}, {given.ranks} ranks of {device.blocks} blocks: {PARTS[name](ranks, given.few)} calls right")


if __name__ == "__main__":
    main()
