"""The host's side of the p2p mode, and its kernels' arithmetic, with ranks and device threads that are threads
of the host."""

import ctypes
import random
import threading
import time

import pytest
import torch

from c10d_custom import dtypes
from c10d_custom.call import Call, Op, Region
from c10d_custom.transport.cuda import algorithm, kernels, p2p
from engine import engine, same
from gpu import one_gpu
from host_kernels import HostKernels
from test_reduce_kernels import Place, pairs

pytestmark = pytest.mark.lane2

FLOAT, SUM = dtypes.BY_DTYPE[torch.float32], int(dtypes.RedOp.SUM)
STAGING = 4096 + 32
FEW = {(p[0], p[1]) for p in one_gpu.PAIRS}

# All_reduces of up to so many bytes have a flag in every word.
with_flags = pytest.mark.parametrize("flagged", [0, 1 << 16])


class Group:
    def __init__(self, library, size):
        pad = p2p.pad_bytes(size)
        total = pad + STAGING + p2p.RECORD_BYTES + 256
        self.memory = [torch.zeros(total, dtype=torch.uint8) for _ in range(size)]
        base = self.pads = [m.data_ptr() + -m.data_ptr() % 256 for m in self.memory]
        self.device = HostKernels(library)
        self.ends = [
            p2p.P2p(
                self.device,
                rank,
                base,
                [b + pad for b in base],
                STAGING,
                base[rank] + pad + STAGING,
                blocks=2,
                threads=3,
            )
            for rank in range(size)
        ]

    def run(self, work, ranks=None):
        """work(rank, end) on a thread for each of these ranks."""
        ranks = range(len(self.ends)) if ranks is None else ranks
        running = [threading.Thread(target=work, args=(r, self.ends[r]), daemon=True) for r in ranks]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        assert not any(thread.is_alive() for thread in running), "a kernel does not end"


@pairs
def test_same_bits_as_the_cpu_engine(library, monkeypatch, dtype, redop):
    monkeypatch.setattr(algorithm, "one_shot_bytes", lambda ranks: 256)
    rng = random.Random(1000 * dtype.code + redop)
    item, size = dtype.item_bytes, rng.choice([1, 2, 3, 4])
    group = Group(library, size)
    # With flags (for few pairs, as the others are reduced by the same code), one-shot, two-shot, several kernels.
    monkeypatch.setattr(algorithm, "FLAGGED_BYTES", 128 if (dtype, redop) in FEW else 0)
    for count in (
        rng.randrange(1, 128 // item + 1),
        rng.randrange(1, 256 // item + 1),
        rng.randrange(256 // item + 1, 1500 // item),
        5001 // item,
    ):
        inputs = [torch.frombuffer(bytearray(rng.randbytes(count * item)), dtype=torch.uint8) for _ in range(size)]
        factors = [rng.choice([0.3, -1.5, 2.0]) for _ in inputs] if redop == kernels.PREMUL_SUM else []
        want = engine(dtype, redop, inputs, count, factors)
        step = rng.choice([16, item, 1])
        places = [
            (Place(count * item, rng.randrange(0, 16, step)), Place(count * item, rng.randrange(0, 16, step)))
            for _ in inputs
        ]
        if rng.random() < 0.5:
            places = [(target, target) for _, target in places]

        def call(rank, end):
            source, target = places[rank]
            source.bytes.copy_(inputs[rank])
            given, taken = ([Region(place.address, count * item, count)] for place in (source, target))
            more = {"count": count, "redop": redop, "factor": factors[rank] if factors else 0.0}
            end.run(0, Call(Op.all_reduce, "sum", dtype, 60, given, taken, **more))

        group.run(call)
        for end, (source, target) in zip(group.ends, places):
            assert end.failure() is None
            problem = same(dtype, redop, target.bytes, want)
            assert problem is None, (size, count, factors, problem)
            assert source.untouched() and target.untouched()


def sums(counts, seconds=60, number=0):
    """Each rank's work: a sum of counts[rank] ones."""

    def call(rank, end):
        data = torch.ones(counts[rank])
        call = Call(Op.all_reduce, "sum", FLOAT, seconds, [data], [data], count=counts[rank], redop=SUM)
        end.run(0, call, number)
        results[rank] = data

    results = {}
    return call, results


@with_flags
def test_a_rank_that_does_not_come(library, monkeypatch, flagged):
    monkeypatch.setattr(algorithm, "FLAGGED_BYTES", flagged)
    group = Group(library, 3)
    call, _ = sums([5, 5, 5], 0.2)
    began = time.monotonic()
    group.run(call, [0, 2])
    assert 0.2 <= time.monotonic() - began < 5
    found = [group.ends[rank].failure() for rank in (0, 2)]
    assert p2p.Failure(p2p.TIMEOUT, 1, 0) in found
    assert all(f.kind == p2p.TIMEOUT and f.peer == 1 or f.kind == p2p.PEER and f.peer in (0, 2) for f in found)
    # It comes after all, and learns that it is too late; nobody waits again.
    group.run(sums([5, 5, 5], 3600)[0])
    assert group.ends[1].failure().kind == p2p.PEER
    assert [group.ends[rank].failure() for rank in (0, 2)] == found


@pytest.mark.parametrize("flagged", [0, 20, 1 << 16])  # 20: rank 1's are not
def test_ranks_that_call_different_things(library, monkeypatch, flagged):
    monkeypatch.setattr(algorithm, "FLAGGED_BYTES", flagged)
    group = Group(library, 3)
    call, _ = sums([5, 6, 5])
    group.run(call)
    found = [end.failure() for end in group.ends]
    assert any(f.kind == p2p.MISMATCH and (rank == 1 or f.peer == 1) for rank, f in enumerate(found))
    assert all(f.kind in (p2p.MISMATCH, p2p.PEER) for f in found)


@with_flags
def test_the_host_ends_the_waiting(library, monkeypatch, flagged):
    monkeypatch.setattr(algorithm, "FLAGGED_BYTES", flagged)
    group = Group(library, 3)
    call, _ = sums([5, 5, 5])
    timer = threading.Timer(0.2, group.ends[0].abort)
    timer.start()
    group.run(call, [0, 1])
    assert group.ends[0].failure() == p2p.Failure(p2p.ABORTED, 0, 0)
    assert group.ends[1].failure() == p2p.Failure(p2p.PEER, 0, 0)


def test_nothing_is_written_in_the_memory_of_ranks_that_are_gone(library):
    group = Group(library, 3)
    call, _ = sums([5, 5, 5])
    timer = threading.Timer(0.2, group.ends[0].abort, ([2],))
    timer.start()
    group.run(call, [0, 1])
    assert group.ends[1].failure() == p2p.Failure(p2p.PEER, 0, 0)
    failed = [ctypes.c_uint64.from_address(pad + 16).value for pad in group.pads]
    assert [bool(word) for word in failed] == [True, True, False], failed
    group.ends[0].abort()  # who is gone, stays so
    assert ctypes.c_uint64.from_address(group.ends[0]._record + 8).value == 1 << 63 | 1 << 2


def test_failures_carry_the_number_of_the_call(library):
    group = Group(library, 2)
    call, results = sums([5, 5])
    for _ in range(3):
        group.run(call)
        assert [r.tolist() for r in results.values()] == [[2.0] * 5] * 2
    group.run(sums([5, 6], number=3)[0])
    assert {end.failure().number for end in group.ends} == {3}


def test_the_host_sees_which_kernels_have_ended(library):
    group = Group(library, 2)
    call, _ = sums([5, 5])
    assert not any(end.busy() for end in group.ends)
    running = threading.Thread(target=call, args=(0, group.ends[0]))
    running.start()
    until = time.monotonic() + 10
    while not group.ends[0].busy() and time.monotonic() < until:
        time.sleep(1e-3)
    assert group.ends[0].busy(), "it waits for rank 1"
    call(1, group.ends[1])
    running.join(10)
    assert not any(end.busy() for end in group.ends)


@pytest.mark.parametrize("number, found", [(7, {None}), (8, {p2p.MISMATCH, p2p.PEER})])
def test_calls_of_different_numbers_do_not_meet(library, number, found):
    group = Group(library, 2)
    at = [[torch.ones(5)] * 2, [torch.ones(5)] * 2]

    def call(rank, end):
        given, taken = (at[rank][:1], []) if rank == 0 else ([], at[rank][1:])
        end.run(0, Call(Op.broadcast, "broadcast", FLOAT, 60, given, taken, root=0, count=5), number if rank else 7)

    group.run(call)
    assert {f and f.kind for f in (end.failure() for end in group.ends)} <= found


def test_structures_are_the_kernels(library):
    library.size_of.restype = ctypes.c_ulonglong
    assert [library.size_of(i) for i in range(5)] == [
        ctypes.sizeof(kernels.ReduceArguments),
        ctypes.sizeof(p2p.Arguments),
        p2p._SIGNALS,
        p2p.RECORD_BYTES,
        algorithm.FLAGGED_BYTES,
    ]
