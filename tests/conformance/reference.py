"""What a reduction must give: computed by one process, in rank order, rounded once. Over several hosts: so
inside each, and then so between their results, in the order of their first ranks."""

import functools

import torch

from harness import Layout

from . import values

# Where a type is accumulated when not in itself.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
if hasattr(torch, "bcomplex32"):
    _WIDER[torch.bcomplex32] = torch.complex64
_WIDER.update(dict.fromkeys(values.FLOAT8, torch.float32))

_FLOAT_STEP = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}  # both propagate nan


def reduced(dtype, op, ranks, kind, count, start=0):
    """Elements start .. start + count of the reduction over these ranks, in this order."""
    return values.tile(_reduced_pattern(dtype, op, tuple(ranks), kind), count, start)


@functools.cache
def _reduced_pattern(dtype, op, ranks, kind):
    inputs = [values.pattern(dtype, rank, kind, op == "PRODUCT") for rank in ranks]
    return reduce_by_host(inputs, op, ranks, [values.factor_of(kind)] * len(inputs))


# torch before 2.13; since then it saturates.
_OVERFLOW_IS_NAN = bool(torch.tensor(1e6).to(torch.float8_e4m3fn).float().isnan())


def reduce_by_host(inputs, op, ranks, factors=None):
    """``ranks``: the global rank of each input, which tells its host in the layout of this run."""
    layout = Layout.chosen()
    host_of = (
        [h for h, count in enumerate(layout.ranks_per_host) for _ in range(count)] if layout else [0] * (max(ranks) + 1)
    )
    hosts = {}
    for i, rank in enumerate(ranks):
        hosts.setdefault(host_of[rank], []).append(i)
    if len(hosts) == 1:
        return reduce_in_order(inputs, op, factors)
    # Division: inside the hosts where it rounds, so that nothing overflows on the way; else at the end.
    at_the_end = inputs[0].dtype in values.INTEGERS
    inside, between = {"AVG": ("SUM", "AVG") if at_the_end else ("AVG", "SUM"), "PREMUL_SUM": (op, "SUM")}.get(
        op, (op, op)
    )
    parts = [
        reduce_in_order(
            [inputs[i] for i in members], inside, [factors[i] for i in members] if factors else None, len(inputs)
        )
        for members in hosts.values()
    ]
    return reduce_in_order(parts, between, divisor=len(inputs))


def reduce_in_order(inputs, op, factors=None, divisor=None):
    divisor = divisor or len(inputs)
    dtype = inputs[0].dtype
    assert values.has_meaning(dtype, op), (dtype, op)
    if dtype is torch.bool:
        return _reduce_bool(inputs, op)
    if dtype in values.INTEGERS:
        return _reduce_integers(inputs, op, divisor)
    if dtype in values.COMPLEX and op != "PRODUCT":
        # Componentwise, so that no complex division or multiplication adds roundings of its own.
        parts = reduce_in_order([torch.view_as_real(t) for t in inputs], op, factors, divisor)
        return values.of_parts(parts, dtype)
    terms = [t.to(_WIDER.get(dtype, dtype)) for t in inputs]
    if op == "PREMUL_SUM":
        terms = [term * torch.full_like(term, factor) for term, factor in zip(terms, factors)]
    total = functools.reduce(_FLOAT_STEP[op], terms)
    if op == "AVG":
        total = total / torch.full_like(total, divisor)
    if dtype is torch.float8_e4m3fn and _OVERFLOW_IS_NAN:
        total = total.clamp(-448, 448)  # the reductions do as newer torch does
    return total.to(dtype)


def _reduce_bool(inputs, op):
    step = {
        "SUM": torch.logical_or,
        "MAX": torch.logical_or,
        "BOR": torch.logical_or,
        "PRODUCT": torch.logical_and,
        "MIN": torch.logical_and,
        "BAND": torch.logical_and,
        "BXOR": torch.logical_xor,
    }[op]
    return functools.reduce(step, inputs)


def _reduce_integers(inputs, op, divisor):
    """In numpy: torch has no arithmetic on uint16, uint32 and uint64. Both wrap."""
    import numpy

    step = {
        "SUM": numpy.add,
        "AVG": numpy.add,
        "PRODUCT": numpy.multiply,
        "MIN": numpy.minimum,
        "MAX": numpy.maximum,
        "BAND": numpy.bitwise_and,
        "BOR": numpy.bitwise_or,
        "BXOR": numpy.bitwise_xor,
    }[op]
    total = functools.reduce(step, [t.numpy() for t in inputs])
    if op == "AVG":
        n = total.dtype.type(divisor)
        # numpy divides towards minus infinity, c10d's integer average towards zero.
        total = total // n + ((total < 0) & (total % n != 0)).astype(total.dtype)
    return torch.from_numpy(total)


def difference(got, want):
    """None if two tensors hold the same bits (nans need not have the same), else what differs."""
    if got.dtype != want.dtype or got.numel() != want.numel():
        return f"{got.dtype}[{got.numel()}] instead of {want.dtype}[{want.numel()}]"
    got_bytes, want_bytes = values.raw(got), values.raw(want)
    if values.same_bytes(got_bytes, want_bytes):
        return None
    size = got.dtype.itemsize
    differs = (got_bytes != want_bytes).reshape(-1, size)
    parts = (got, want)
    if got.dtype in values.COMPLEX:
        parts = tuple(torch.view_as_real(t.contiguous()) for t in parts)
        differs = differs.reshape(-1, size // 2)
    differs = differs.any(dim=1)
    if got.dtype in values.FLOATS + values.COMPLEX:
        nans = [torch.isnan(t.contiguous().reshape(-1).to(torch.float64)) for t in parts]
        differs &= ~(nans[0] & nans[1])
    where = differs.nonzero().reshape(-1)
    if not len(where):
        return None
    first = int(where[0])
    shown = []
    for part in parts:
        value = part.contiguous().reshape(-1)[first : first + 1]
        shown.append(f"{value.item()!r} (bytes {bytes(values.raw(value).tolist()).hex()})")
    return (
        f"{len(where)} of {len(differs)} values differ, the first at {first}, the last at {int(where[-1])}: "
        f"first {shown[0]} instead of {shown[1]}"
    )
