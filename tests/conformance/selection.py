"""Which cases are run.

The quick selection covers, at every world size and for every collective:
    pairs     every dtype (x op), small and multi-block, mild and rough values, floats also special ones
    small     the small ones of these, for calls that another collective's data plane serves
    medium    every dtype (x op) at a size between: over several hosts, that of an all_reduce by their first ranks
    sizes     every byte size below, for dtypes of different widths
    layouts   every layout, for a few dtypes, small and multi-block, sync and async, whole group and subgroup
Collectives that handle a chunk for each rank get smaller large chunks at 4 and 8 ranks; layouts that are the same on
all ranks are left out at 3 and 8 (conftest.py). Where an axis is not crossed (sync/async, root, multi-block size),
its values rotate from case to case. --full crosses them:
    pairs     dtype (x op) x every size x kind x sync/async x group (small: the small ones of these)
    layouts   dtype (x op) x layout x four sizes x sync/async x group
"""

import itertools

import torch

from . import values
from .cases import Case
from .strides import LAYOUTS

KIB = 1024
# Around the engine's thresholds: small-message paths end at 16 to 64 KiB, a block is 128 KiB.
EDGES = (16 * KIB, 64 * KIB, 128 * KIB, 1024 * KIB)
LARGE = 3 * 1024 * KIB
SMALL_COUNTS = (0, 1, 7)
SMALL = 7
SMALL_SPECIAL = 203  # room for all special values
MEDIUM_BYTES = 20 * KIB
MULTI_BLOCK_BYTES = (300 * KIB, 128 * KIB + 16, 515 * KIB)


def all_counts(dtype):
    size = dtype.itemsize
    edges = [edge // size + delta for edge in EDGES for delta in (-1, 0, 1)]
    return [*SMALL_COUNTS, *edges, LARGE // size + 5]


def kinds_of(dtype, op):
    if op is None:
        return ("bits",)
    if dtype in values.FLOATS:
        return ("mild", "rough", "special")
    if dtype is torch.bool or (dtype in values.COMPLEX and op == "PRODUCT"):
        return ("mild",)  # how a complex product rounds is the multiplication's own affair
    return ("mild", "rough")


def pairs(reducing):
    return values.PAIRS if reducing else tuple((dtype, None) for dtype in values.DTYPES)


def torch_refuses(collective, case):
    """Pairs that have a meaning but that torch.distributed never hands to a backend as they are."""
    if collective.startswith("functional") and case.dtype is getattr(torch, "bcomplex32", ()):
        return True  # torch 2.15 cannot make complex numbers of its parts again
    if case.dtype in values.COMPLEX and case.op == "PRODUCT":
        # The functional ones hand on the real view unasked: the product is one of components.
        return "all_reduce" in collective or collective.startswith("functional")
    return collective.startswith("functional") and case.op == "PREMUL_SUM"  # it has no name there


def pair_cases(reducing, full, shrink=1):
    if full:
        return [
            Case(dtype, count, op, kind, async_op=async_op, members=members, root=root)
            for root, ((dtype, op), async_op, members) in enumerate(
                itertools.product(pairs(reducing), (False, True), ("world", "unsorted"))
            )
            for count in all_counts(dtype)
            for kind in kinds_of(dtype, op)
        ]
    cases = []
    for dtype, op in pairs(reducing):
        kinds = kinds_of(dtype, op)
        for kind in kinds:
            turn = len(cases)
            large = MULTI_BLOCK_BYTES[turn % len(MULTI_BLOCK_BYTES)] // shrink // dtype.itemsize + 3
            counts = [SMALL_SPECIAL if kind == "special" else SMALL]
            if kind != "mild" or len(kinds) == 1:  # in large numbers, rough values say all that mild ones do
                counts.append(large)
            cases += [Case(dtype, count, op, kind, async_op=turn // 2 % 2 == 1, root=turn // 3) for count in counts]
    return cases


def size_cases(reducing, largest):
    op, kind = ("SUM", "rough") if reducing else (None, "bits")
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128)
    return [
        Case(dtype, count, op, kind, async_op=(i + turn) % 2 == 1, root=turn)
        for i, dtype in enumerate(dtypes)
        for turn, count in enumerate(all_counts(dtype))
        if count * dtype.itemsize <= largest
    ]


def layout_cases(layout, reducing, full, shrink=1):
    if full:
        chosen = pairs(reducing)
    elif reducing:
        chosen = (
            (torch.uint8, "SUM"),
            (torch.int16, "MAX"),
            (torch.float16, "SUM"),
            (torch.float32, "SUM"),
            (torch.complex64, "SUM"),
            (torch.float8_e4m3fn, "SUM"),
        )
    else:
        chosen = tuple(
            (dtype, None)
            for dtype in (
                torch.uint8,
                torch.float16,
                torch.float32,
                torch.complex64,
                torch.complex128,
                torch.float8_e8m0fnu,
            )
        )
    cases = []
    for dtype, op in chosen:
        # Multiples of 7: a transposed tensor of them is a true matrix.
        large = 7 * (290 * KIB // shrink // dtype.itemsize // 7 + 1)
        counts = (1,) if layout == "scalar" else (0, 1, 21, large) if full or layout != "contiguous" else (21, large)
        for count, async_op, members in itertools.product(counts, (False, True), ("world", "unsorted")):
            kinds = kinds_of(dtype, op)
            cases.append(Case(dtype, count, op, kinds[-1], layout, members, async_op, root=len(cases)))
            if not full and len(kinds) > 1 and count == 21:
                cases.append(Case(dtype, count, op, "mild", layout, members, async_op, root=len(cases)))
    return cases


def time_for(cases):
    """Seconds: generous, for many ranks on few busy cores."""
    return 60 + 0.25 * len(cases)


SECTIONS = ("pairs", "sizes", *LAYOUTS)


# All others handle a chunk for each rank, which at 8 ranks would be most of the quick run.
ONE_CHUNK = ("all_reduce", "reduce", "broadcast", "send_recv")


def cases_of(collective, section, reducing, full, world_size):
    shrink = 1 if full or collective in ONE_CHUNK else max(1, world_size // 2)
    if section == "pairs":
        cases = pair_cases(reducing, full, shrink)
    elif section == "small":
        cases = [case for case in pair_cases(reducing, full) if case.count <= SMALL_SPECIAL]
    elif section == "medium":
        cases = [
            Case(dtype, MEDIUM_BYTES // dtype.itemsize + turn % 3, op, kinds_of(dtype, op)[-1], async_op=turn % 2 == 1)
            for turn, (dtype, op) in enumerate(pairs(reducing))
        ]
    elif section == "sizes":
        # 2 KiB of room for the odd elements beyond an edge.
        cases = size_cases(reducing, (LARGE if shrink == 1 else 2048 * KIB // shrink) + 2 * KIB)
    else:
        cases = layout_cases(section, reducing, full, shrink)
    return [case for case in cases if not torch_refuses(collective, case)]
