"""Which dtypes and reduce ops there are, which pairs have a meaning, and inputs known to every rank.

Input i of rank r is pattern(r)[i % PERIOD]: any rank can compute any rank's input, and a reference
for PERIOD elements is one for every count. PERIOD is prime and no divisor of a block, so that data
that lands in the wrong block, or in the wrong rank's place, never looks right.
"""

import ctypes
import functools

import torch
import torch.distributed as dist

PERIOD = 4099

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
INTEGERS = UNSIGNED + SIGNED
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64) + FLOAT8
# Each complex type, and that of its two parts.
PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
if hasattr(torch, "bcomplex32"):  # torch 2.15
    PARTS[torch.bcomplex32] = torch.bfloat16
COMPLEX = tuple(PARTS)
MOVE_ONLY = (torch.float8_e8m0fnu,)  # exponents alone: no sign, no zero
REDUCIBLE = INTEGERS + (torch.bool,) + FLOATS + COMPLEX
DTYPES = REDUCIBLE + MOVE_ONLY

BITWISE = ("BAND", "BOR", "BXOR")
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG") + BITWISE + ("PREMUL_SUM",)


def has_meaning(dtype, op):
    if dtype in INTEGERS:
        return op != "PREMUL_SUM"
    if dtype is torch.bool:
        return op not in ("AVG", "PREMUL_SUM")
    if dtype in FLOATS:
        return op not in BITWISE
    if dtype in COMPLEX:
        return op in ("SUM", "PRODUCT", "AVG", "PREMUL_SUM")
    return False


PAIRS = tuple((dtype, op) for dtype in REDUCIBLE for op in OPS if has_meaning(dtype, op))
MEANINGLESS = tuple((dtype, op) for dtype in DTYPES for op in OPS if not has_meaning(dtype, op))

# The kinds of values.
#   mild     small integers: every order of adding them gives the same bits.
#   rough    order and rounding matter; integers wrap.
#   special  among rough floats: nan, infinities, the largest, the smallest, values that overflow in a sum.
#   bits     any bit pattern, for what only moves data.
KINDS = ("mild", "rough", "special", "bits")


def factor_of(kind):
    """PREMUL_SUM's factor: exact in every type for mild values, inexact for the others."""
    return 2.0 if kind == "mild" else 0.3


def reduce_op(op, kind="mild"):
    return dist._make_nccl_premul_sum(factor_of(kind)) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def raw(tensor):
    """The bytes of a tensor in logical order."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element of a strided tensor counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def same_bytes(one, other):
    """As torch.equal of two tensors of bytes, on any device, in a tenth of the time: that looks at each byte."""
    assert one.dtype == other.dtype == torch.uint8
    one, other = one.cpu().contiguous(), other.cpu().contiguous()
    return one.numel() == other.numel() and not _memcmp(one.data_ptr(), other.data_ptr(), one.numel())


def of_parts(parts, dtype):
    """Complex numbers of tensors whose last dimension is their two parts: torch.view_as_complex, of every type."""
    return parts.contiguous().view(dtype).squeeze(-1)


def tile(pattern, count, start=0):
    """Elements start .. start + count of the endless repetition of a pattern of PERIOD elements."""
    size = pattern.dtype.itemsize
    begin = start % PERIOD
    repeats = -(-(begin + count) // PERIOD)
    elements = raw(pattern).clone() if repeats < 2 else raw(pattern).repeat(repeats)
    return elements[begin * size : (begin + count) * size].view(pattern.dtype)


def inputs(dtype, rank, kind, op, count, start=0):
    """Elements start .. start + count of what this rank puts in."""
    return tile(pattern(dtype, rank, kind, op == "PRODUCT"), count, start)


@functools.cache
def pattern(dtype, rank, kind, product=False):
    generator = torch.Generator().manual_seed(1000 * DTYPES.index(dtype) + 10 * rank + KINDS.index(kind))
    if kind == "bits" or (kind == "rough" and dtype in INTEGERS):
        return _random_bits(dtype, generator)
    if dtype is torch.bool:
        return torch.randint(0, 2, (PERIOD,), generator=generator).to(torch.bool)
    if kind == "mild":
        return _small_integers(dtype, product, generator)
    if dtype in COMPLEX:
        return of_parts(torch.stack([_rough(PARTS[dtype], product, generator) for _ in range(2)], dim=1), dtype)
    values = _rough(dtype, product, generator)
    if kind == "special":
        # Later ranks differ in where and which, so that a nan meets numbers, infinities their opposites.
        for i, value in enumerate(_special_values(dtype)):
            values[(7 * i + rank) % 101 :: 101] = value
    return values


def _random_bits(dtype, generator):
    if dtype is torch.bool:  # any other byte is not a bool
        return torch.randint(0, 2, (PERIOD,), generator=generator).to(torch.bool)
    words = torch.randint(-(2**63), 2**63 - 1, (PERIOD * dtype.itemsize // 8 + 1,), generator=generator)
    return words.view(torch.uint8)[: PERIOD * dtype.itemsize].view(dtype)


def _small_integers(dtype, product, generator):
    # A product of 8 ranks' values must stay exact in float8_e5m2: powers of two only.
    numbers = [1, 2, 1, 1] if product else [0, 1, 2, 3]
    if dtype not in UNSIGNED:
        numbers += [-n for n in numbers if n]
    parts = []
    for _ in range(2 if dtype in COMPLEX else 1):
        choice = torch.randint(0, len(numbers), (PERIOD,), generator=generator)
        parts.append(torch.tensor(numbers, dtype=torch.float32)[choice])
    if dtype in COMPLEX:
        return torch.complex(*parts).to(dtype)
    return parts[0].to(torch.int64).to(dtype) if dtype in UNSIGNED else parts[0].to(dtype)


# Powers of two that spread the magnitudes: wide enough that adding in another order rounds
# differently, narrow enough that most sums of 8 are finite.
_SPREAD = {
    torch.float16: 6,
    torch.bfloat16: 12,
    torch.float32: 12,
    torch.float64: 25,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 3,
    torch.float8_e5m2: 6,
    torch.float8_e5m2fnuz: 6,
}


def _rough(dtype, product, generator):
    spread = 1 if product else _SPREAD[dtype]
    magnitude = torch.randn(PERIOD, generator=generator, dtype=torch.float64)
    exponent = torch.randint(-spread, spread + 1, (PERIOD,), generator=generator, dtype=torch.float64)
    values = magnitude * torch.exp2(exponent)
    # No zeros: which of -0 and +0 is the minimum is nobody's promise.
    values[values.abs() < 2.0**-spread] = 1.0
    return values.to(torch.float32).to(dtype) if dtype in FLOAT8 else values.to(dtype)


def _special_values(dtype):
    limits = torch.finfo(dtype)
    numbers = [
        float("nan"),
        float("inf"),
        float("-inf"),
        limits.max,
        limits.min,
        limits.max,
        limits.smallest_normal,
        -limits.smallest_normal / 2,
    ]
    return [torch.tensor(n, dtype=torch.float64).to(dtype) for n in numbers]
