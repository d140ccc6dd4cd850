"""The CUDA reduction's arithmetic, without a GPU: its sources compiled as C++ for the host, against the CPU
engine bit for bit and against torch."""

import ctypes
import random

import pytest
import torch

from c10d_custom import dtypes
from c10d_custom.errors import UsageError
from c10d_custom.native import OK, lib
from c10d_custom.transport.cuda import kernels
from conformance import reference, values
from host_kernels import PAIRS, HostKernels

GUARD, FILL = 64, 0xA5
# In elements; the last goes round the loop over Vectors of one emulated processor more than once.
COUNTS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 255, 257, 4099]
LONG_BYTES = 100_003
NATIVE_FLOATS = {"float32", "float64", "complex64", "complex128"}

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


def engine(dtype, redop, sources, count, factors):
    """The CPU engine's result of tensors of bytes."""
    result = torch.empty(count * dtype.item_bytes, dtype=torch.uint8)
    addresses = (ctypes.c_void_p * len(sources))(*[s.data_ptr() for s in sources])
    doubles = (ctypes.c_double * len(factors))(*factors) if factors else None
    assert lib.c10d_reduce(dtype.code, redop, result.data_ptr(), addresses, len(sources), count, doubles) == OK
    return result


def torch_dtype(dtype):
    return getattr(torch, dtype.name)


def same(dtype, redop, got, want):
    """None, or what differs. What a NaN of arithmetic in float or double looks like is the processor's matter;
    every other bit must agree, those of NaNs in narrower formats or passed through by MIN and MAX too."""
    if dtype.name in NATIVE_FLOATS and dtypes.REDUCE_OPS[redop] not in ("MIN", "MAX"):
        return reference.difference(got.clone().view(torch_dtype(dtype)), want.view(torch_dtype(dtype)))
    return None if torch.equal(got, want) else f"{int((got != want).sum())} bytes differ"


@pairs
def test_same_bits_as_the_cpu_engine(device, dtype, redop):
    rng = random.Random(1000 * dtype.code + redop)
    item = dtype.item_bytes
    cases = [(ranks, count) for ranks in range(1, 9) for count in rng.sample(COUNTS, 4)]
    for ranks, count in cases + [(ranks, LONG_BYTES // item) for ranks in (2, 5)]:
        size = count * item
        inputs = [torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8) for _ in range(ranks)]
        factors = {
            kernels.PREMUL_SUM: [rng.choice([0.3, -1.5, 2.0, 1e-3]) for _ in inputs],
            kernels.AVG: rng.choice([[], [7.0]]),
        }.get(redop, [])
        factor = factors[0] if redop == kernels.AVG and factors else factors or None
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
        device.reduce(0, dtype, redop, factor, [s.address for s in sources], [t.address for t in targets], count)
        want = engine(dtype, redop, inputs, count, factors)
        for target in targets:
            problem = same(dtype, redop, target.bytes, want)
            assert problem is None, (ranks, count, [p.address % 16 for p in places], factors, problem)
        assert all(p.untouched() for p in places)
        for place, data in zip(sources, inputs):
            assert place in targets or torch.equal(place.bytes, data)


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
            factors if op == "PREMUL_SUM" else None,
            [i.data_ptr() for i in inputs],
            [result.data_ptr()],
            values.PERIOD,
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
        device.reduce(
            0, dtype, kernels.PREMUL_SUM, [factor, 0.0], [codes.data_ptr(), ones.data_ptr()], [result.data_ptr()], 65536
        )
        want = (codes.to(torch.float32) * torch.tensor(factor, dtype=torch.float32) + 0.0).to(torch.float16)
        assert reference.difference(result, want) is None, factor


def test_nothing_to_do_and_too_much(device):
    dtype, total = dtypes.BY_DTYPE[torch.float32], int(dtypes.RedOp.SUM)
    data = torch.ones(4)
    device.reduce(0, dtype, total, None, [data.data_ptr()], [data.data_ptr()], 0)
    device.reduce(0, dtype, total, None, [data.data_ptr()] * 64, [data.data_ptr()], 4)
    assert data.tolist() == [64.0] * 4
    with pytest.raises(UsageError, match="1 to 64 sources"):
        device.reduce(0, dtype, total, None, [data.data_ptr()] * 65, [data.data_ptr()], 4)
    with pytest.raises(UsageError, match="BAND has no meaning for torch.float32"):
        device.reduce(0, dtype, int(dtypes.RedOp.BAND), None, [data.data_ptr()], [data.data_ptr()], 4)


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
