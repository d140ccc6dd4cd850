"""Inputs whose results are exactly known, in every dtype, order of reduction and rounding.

All values are small integers, so that no partial result needs rounding; they differ between ranks and between
neighbours, and repeat after a prime number of elements, so that a misplaced block does not go unnoticed.
"""

from __future__ import annotations

import functools
import operator

import torch

_LENGTH = 997


def _exact(dtype: torch.dtype) -> int:
    """Integers from 0 to this one are exact."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point or dtype.is_complex:
        if dtype.itemsize == 1:  # finfo says other things of some of these
            integers = torch.arange(256.0)
            return int((integers.to(dtype).float() != integers).nonzero()[0]) - 1
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


def _table(dtype: torch.dtype, redop: str | None, size: int) -> torch.Tensor:
    """int64 [size, _LENGTH]: each rank's values."""
    i, r, most = torch.arange(_LENGTH)[None], torch.arange(size)[:, None], _exact(dtype)
    if dtype is torch.bool:  # from no rank to every rank
        return ((i + r) % (size + 1) < i % (size + 2)).long()
    if redop == "SUM" and most // size < 2:
        return ((i + r) % size < 1 + i % most).long()
    if redop == "SUM":
        return 1 + (i + 3 * r) % min(11, most // size)
    if redop == "PRODUCT":
        return 1 + ((i + r) % size < i % (most.bit_length() - 1)).long()
    if redop == "AVG":  # pairs of ranks differ by 2, and the sum is a multiple of the number of ranks
        apart = torch.where((r == size - 1) & (size % 2 == 1), 0, 2 * (r % 2) - 1)
        return 1 + i % max(1, min(9, most // size - 1)) + apart
    if redop in ("BAND", "BOR", "BXOR"):
        return 1 + (5 * i + 3 * r) % 100
    return 1 + (i + 3 * r) % min(101, most)


_REDUCE = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}
_OF_BOOL = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
REDOPS = tuple(_REDUCE)


class Values:
    """What every rank puts in, and what the reduction of all ``size`` ranks by ``redop`` (None: there is none) must
    give. Tensors are of one dimension, ``count`` elements of ``dtype``."""

    def __init__(self, dtype: torch.dtype, redop: str | None, size: int) -> None:
        self._dtype, self._of = dtype, _table(dtype, redop, size)
        if redop is not None:
            name = _OF_BOOL.get(redop, redop) if dtype is torch.bool else redop
            self._reduced = functools.reduce(_REDUCE[name], self._of)
            if redop == "AVG":
                self._reduced = self._reduced // size

    def of(self, rank: int, count: int, first: int = 0) -> torch.Tensor:
        """Elements ``first`` to ``first + count`` of a rank's values."""
        return self._stretched(self._of[rank], count, first)

    def reduced(self, count: int, first: int = 0) -> torch.Tensor:
        return self._stretched(self._reduced, count, first)

    def _stretched(self, values: torch.Tensor, count: int, first: int) -> torch.Tensor:
        values = (values.float() if self._dtype.is_floating_point else values).to(self._dtype)
        # As bytes: torch repeats some dtypes only so.
        item, first = self._dtype.itemsize, first % _LENGTH
        copies = values.view(torch.uint8).repeat((first + count) // _LENGTH + 1)
        return copies[first * item : (first + count) * item].clone().view(self._dtype)


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count], of any dtype."""
    return torch.zeros(count * dtype.itemsize, dtype=torch.uint8).view(dtype)


def overwrite(tensor: torch.Tensor) -> None:
    """Overwrites the tensor with bytes that no result has."""
    tensor.view(torch.uint8).fill_(0xA5)


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements of two tensors are not the same, bit for bit."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(a.dtype.itemsize, torch.int64)
    different = a.view(kind) != b.view(kind)
    if a.dtype.itemsize == 16:
        different = different.view(-1, 2).any(1)
    return int(different.sum())
