"""Runs kernels of a few pairs, built for the host, through all that they must do: what mutants.py has checked."""

import ctypes
import random

from c10d_custom.transport.cuda import kernels
from engine import engine, same
from gpu import one_gpu
from host_kernels import BY_NAME, HostKernels
from test_leader_kernel import Ranks, random_bytes

PAIRS = [
    BY_NAME[pair]
    for pair in (
        ("int32", "SUM"),
        ("float32", "SUM"),
        ("bfloat16", "AVG"),
        ("float32", "PREMUL_SUM"),
        ("int8", "MAX"),
        ("bool", "BXOR"),
    )
]


def fused(library):
    one_gpu.PAIRS[:] = PAIRS
    one_gpu.WITHIN = 10.0
    for size in (2, 3):
        ranks = one_gpu.Ranks(one_gpu.Host(size, library), size)
        for part in one_gpu.PARTS.values():
            part(ranks, False)


def reduced(library):
    """Jobs of all lengths and alignments, in place or not."""
    rng = random.Random(1)
    for dtype, redop in PAIRS * 12:
        item, ranks = dtype.item_bytes, rng.randrange(1, 10)
        factors = [rng.choice([0.3, -1.5, 2.0]) for _ in range(ranks)] if redop == kernels.PREMUL_SUM else []
        places, jobs, wanted = Ranks(rng, item), [], []
        for _ in range(rng.choice([1, 1, 3, 5])):
            count = rng.choice([1, 2, 5, 16, 17, 33, 255, 9001])
            data = [random_bytes(rng, count * item) for _ in range(ranks)]
            sources = [places.place(d) for d in data]
            targets = [places.place(random_bytes(rng, count * item)) for _ in range(rng.randrange(1, 3))]
            targets += rng.sample(sources, rng.randrange(2))
            jobs.append(kernels.Job([s.address for s in sources], [t.address for t in targets], count))
            wanted.append((targets, engine(dtype, redop, data, count, factors)))
        HostKernels(library, rng.choice([1, 3])).reduce(0, dtype, redop, factors, jobs)
        for targets, want in wanted:
            assert all(same(dtype, redop, t.bytes, want) is None for t in targets)
        assert all(p.untouched() for p in places.all)


def check(library, part):
    """What is wrong with the kernels, or None."""
    try:
        {"reduced": reduced, "fused": fused}[part](ctypes.CDLL(library))
    except AssertionError as error:
        return repr(error)
    return None
