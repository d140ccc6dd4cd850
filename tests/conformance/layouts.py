"""Tensors of one content in different layouts, and a check that nothing around them was written.

    contiguous   t[n]
    strided      base[::2]
    transposed   a 2-d matrix, transposed
    offset       base[3:-5]: neither at the start of its storage nor aligned
    scalar       zero-dim, where there is one element; else contiguous
    mixed        another layout on every rank: elements then correspond in logical order
"""
import torch

from . import values

LAYOUTS = ("contiguous", "strided", "transposed", "offset", "scalar", "mixed")
_MIXED = ("contiguous", "transposed", "strided", "offset")


class Placed:
    """A tensor with known content, inside memory of its own."""

    def __init__(self, content, layout, rank=0):
        self.layout = _MIXED[rank % len(_MIXED)] if layout == "mixed" else layout
        count, dtype = content.numel(), content.dtype
        room = {"strided": 2 * count, "offset": count + 8}.get(self.layout, count)
        # 0x01: a byte that is valid in every dtype, bool included.
        self._memory = torch.ones(room * dtype.itemsize, dtype=torch.uint8).view(dtype)
        if self.layout == "strided":
            self.tensor = self._memory[::2]
        elif self.layout == "transposed":
            # As many rows as needed: what splits dim 0 of n times count elements into n still can.
            columns = 7 if count % 7 == 0 else 1
            self.tensor = self._memory.view(columns, count // columns).t()
        elif self.layout == "offset":
            self.tensor = self._memory[3:3 + count]
        elif self.layout == "scalar" and count == 1:
            self.tensor = self._memory.view(())
        else:
            self.tensor = self._memory
        self.tensor.copy_(content.reshape(self.tensor.shape))

    def stray_write(self):
        """What was written around the tensor, or None."""
        if self.tensor.numel() == self._memory.numel():
            return None  # there is nothing around it
        clean = Placed(self.tensor.contiguous().reshape(-1), self.layout)
        if torch.equal(values.raw(clean._memory), values.raw(self._memory)):
            return None
        return f"memory around a {self.layout} tensor was written"


def blank(dtype, count, layout, rank=0):
    """A place for an output: bytes that no right answer consists of, and no view of the input."""
    content = torch.full((count * dtype.itemsize,), 1, dtype=torch.uint8).view(dtype)
    return Placed(content, layout, rank)
