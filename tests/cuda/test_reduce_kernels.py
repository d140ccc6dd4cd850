"""The CUDA reduction's arithmetic, without a GPU: its sources compiled as C++ for the host, against the CPU
engine bit for bit and against torch."""

import random

import pytest
import torch

from c10d_custom import dtypes
from c10d_custom.errors import UsageError
from c10d_custom.transport.cuda import kernels
from conformance import reference, values
from engine import engine, same, torch_dtype
from host_kernels import PAIRS, HostKernels

pytestmark = pytest.mark.lane2

GUARD, FILL = 64, 0xA5
# In elements; the last goes round the loop over Vectors of one emulated processor more than once.
COUNTS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 255, 257, 4099]
LONG_BYTES = 100_003

pairs = pytest.mark.parametrize("dtype,redop", PAIRS, ids=lambda v: getattr(v, "name", None) or dtypes.REDUCE_OPS[v])


@pytest.fixture
def device(library):
    return HostKernels(library, processors=1)


class Place:
    """Bytes at a chosen remainder modulo 16 with guards around them."""

    def __init__(self, size, remainder):
        self._memory = torch.full((size + 2 * GUARD + 32,), FILL, dtype=torch.uint8)
        start = GUARD + (remainder - self._memory.data_ptr() - GUARD) % 16
        self.bytes = self._memory[start : start + size]
        self._around = (self._memory[:start], self._memory[start + size :])
        self.address = self._memory.data_ptr() + start

    def untouched(self):
        return all(bool((part == FILL).all()) for part in self._around)


@pairs
def test_same_bits_as_the_cpu_engine(device, dtype, redop):
    rng = random.Random(1000 * dtype.code + redop)
    item = dtype.item_bytes
    cases = [(ranks, count) for ranks in range(1, 9) for count in rng.sample(COUNTS, 4)]
    for ranks, count in cases + [(ranks, LONG_BYTES // item) for ranks in (2, 5)]:
        size = count * item
        inputs = [torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8) for _ in range(ranks)]
        factors = [rng.choice([0.3, -1.5, 2.0, 1e-3]) for _ in inputs] if redop == kernels.PREMUL_SUM else []
        # One remainder for all, on an element's boundary; one for each on such a boundary; any.
        step = rng.choice([item, item, 1])
        common = rng.choice([None, rng.randrange(0, 16, min(item, 16))]) if step == item else None
        places = [
            Place(size, rng.randrange(0, 16, step) if common is None else common)
            for _ in range(ranks + rng.randrange(1, 4))
        ]
        sources, targets = places[:ranks], places[ranks:]
        for place, data in zip(sources, inputs):
            place.bytes.copy_(data)
        if rng.random() < 0.3:
            targets.append(rng.choice(sources))  # in place
        job = kernels.Job([s.address for s in sources], [t.address for t in targets], count)
        device.reduce(0, dtype, redop, factors, [job])
        want = engine(dtype, redop, inputs, count, factors)
        for target in targets:
            problem = same(dtype, redop, target.bytes, want)
            assert problem is None, (ranks, count, [p.address % 16 for p in places], factors, problem)
        assert all(p.untouched() for p in places)
        for place, data in zip(sources, inputs):
            assert place in targets or values.same_bytes(place.bytes, data)


@pairs
def test_several_jobs_in_one_launch(device, dtype, redop):
    """Each as by itself: of other lengths, other sources, other places; some of no length."""
    rng = random.Random(7000 * dtype.code + redop)
    item = dtype.item_bytes
    for jobs in (2, 3, 16):
        ranks = rng.randrange(1, 9)
        factors = [rng.choice([0.3, -1.5, 2.0]) for _ in range(ranks)] if redop == kernels.PREMUL_SUM else []
        made, wanted = [], []
        for job in range(jobs):
            count = rng.choice([*COUNTS, 0, 20_011 // item]) if job else 20_011 // item
            inputs = [
                torch.frombuffer(bytearray(rng.randbytes(count * item or 1)), dtype=torch.uint8) for _ in range(ranks)
            ]
            inputs = [data[: count * item] for data in inputs]
            common = rng.choice([None, rng.randrange(0, 16, item)])
            places = [
                Place(count * item, rng.randrange(16) if common is None else common)
                for _ in range(ranks + rng.randrange(1, 4))
            ]
            for place, data in zip(places, inputs):
                place.bytes.copy_(data)
            targets = [*places[ranks:], *rng.sample(places[:ranks], rng.randrange(2))]
            made.append((places, kernels.Job([p.address for p in places[:ranks]], [t.address for t in targets], count)))
            wanted.append((targets, count and engine(dtype, redop, inputs, count, factors)))
        device.reduce(0, dtype, redop, factors, [job for _, job in made])
        for targets, want in wanted:
            for target in targets:
                problem = same(dtype, redop, target.bytes, want) if target.bytes.numel() else None
                assert problem is None, (jobs, ranks, len(target.bytes), problem)
        assert all(p.untouched() for places, _ in made for p in places)


def product(inputs):
    """Of complex numbers, each step of it rounded: torch fuses some of them."""
    parts = [torch.view_as_real(t).to(reference._WIDER.get(t.dtype, t.dtype).to_real()).unbind(-1) for t in inputs]
    a, b = parts[0]
    for re, im in parts[1:]:
        a, b = a * re - b * im, a * im + b * re
    return torch.complex(a, b).to(inputs[0].dtype)


@pairs
@pytest.mark.parametrize("kind", ["mild", "rough", "special"])
def test_what_torch_computes(device, dtype, redop, kind):
    op, t = dtypes.REDUCE_OPS[redop], torch_dtype(dtype)
    if kind == "special" and t not in values.FLOATS:
        return  # there are none: that these are the float types is values.py's to say
    for ranks in (1, 2, 3, 8):
        inputs = [values.inputs(t, rank, kind, op, values.PERIOD) for rank in range(ranks)]
        factors = [values.factor_of(kind)] * ranks
        result = torch.empty_like(inputs[0])
        device.reduce(
            0,
            dtype,
            redop,
            factors if op == "PREMUL_SUM" else [],
            [kernels.Job([i.data_ptr() for i in inputs], [result.data_ptr()], values.PERIOD)],
        )
        by_hand = t in values.COMPLEX and op == "PRODUCT"
        want = product(inputs) if by_hand else reference.reduce_in_order(inputs, op, factors)
        problem = reference.difference(result, want)
        assert problem is None, (ranks, problem)


def test_every_float16_code_and_the_roundings_next_to_it(device):
    """float16's conversions are the GPU's instructions; what stands for them here is held against torch."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    ones = torch.ones_like(codes)
    dtype = dtypes.BY_DTYPE[torch.float16]
    result = torch.empty_like(codes)
    for factor in (1.0, 1 + 2**-11, 1 - 2**-12, 1 + 3 * 2**-12, 2.0**-9, 1.5):
        job = kernels.Job([codes.data_ptr(), ones.data_ptr()], [result.data_ptr()], 65536)
        device.reduce(0, dtype, kernels.PREMUL_SUM, [factor, 0.0], [job])
        want = (codes.to(torch.float32) * torch.tensor(factor, dtype=torch.float32) + 0.0).to(torch.float16)
        assert reference.difference(result, want) is None, factor


def test_nothing_to_do_and_too_much(device):
    dtype, total = dtypes.BY_DTYPE[torch.float32], int(dtypes.RedOp.SUM)
    data = torch.ones(4)
    at = data.data_ptr()

    def reduce(redop, *jobs):
        device.reduce(0, dtype, redop, [], jobs)

    reduce(total, kernels.Job([at], [at], 0))
    reduce(total)
    reduce(total, kernels.Job([at] * 64, [at], 4))
    assert data.tolist() == [64.0] * 4
    with pytest.raises(UsageError, match="1 to 64 sources"):
        reduce(total, kernels.Job([at] * 65, [at], 4))
    with pytest.raises(IndexError):
        reduce(total, *[kernels.Job([at], [at], 4)] * 17)
    with pytest.raises(ValueError):
        reduce(total, *[kernels.Job([at] * 60, [at] * 40, 4)] * 3)
    with pytest.raises(UsageError, match="BAND has no meaning for torch.float32"):
        reduce(int(dtypes.RedOp.BAND), kernels.Job([at], [at], 4))


@pytest.mark.parametrize(
    "addresses,item,expected",
    [
        ([32, 48], 4, (16, 0)),
        ([36, 52], 4, (16, 4)),
        ([33, 49], 1, (16, 1)),
        ([33, 49], 2, (1, 0)),
        ([36, 48], 4, (4, 0)),
        ([40, 48], 4, (8, 0)),
        ([40, 56], 16, (8, 0)),
        ([34, 48], 2, (2, 0)),
    ],
)
def test_alignment(addresses, item, expected):
    assert kernels.alignment(addresses, item) == expected
