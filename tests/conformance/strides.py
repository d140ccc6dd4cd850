"""Tensors of one content in different layouts, and a check that nothing around them was written.

contiguous   t[n]
strided      base[::2]
transposed   a 2-d matrix, transposed
offset       base[3:-5]: neither at the start of its storage nor aligned
scalar       zero-dim, where there is one element; else contiguous
mixed        another layout on every rank: elements then correspond in logical order
"""

import torch

from .values import same_bytes

LAYOUTS = ("contiguous", "strided", "transposed", "offset", "scalar", "mixed")
_MIXED = ("contiguous", "transposed", "strided", "offset")


class Placed:
    """A tensor with known content, inside memory of its own. No content: as `blank` says."""

    def __init__(self, content, layout, rank=0, device="cpu", dtype=None, count=None):
        self.layout = _MIXED[rank % len(_MIXED)] if layout == "mixed" else layout
        self._count, self._dtype = (count, dtype) if content is None else (content.numel(), content.dtype)
        room = {"strided": 2 * self._count, "offset": self._count + 8}.get(self.layout, self._count)
        # 0x01: a byte that is valid in every dtype, bool included.
        memory = torch.ones(room * self._dtype.itemsize, dtype=torch.uint8)
        if content is not None:
            tensor = self._view(memory)
            tensor.copy_(content.reshape(tensor.shape))
        self._memory = memory.to(device)
        self.tensor = self._view(self._memory)

    def _view(self, memory):
        memory = memory.view(self._dtype)
        if self.layout == "strided":
            return memory[::2]
        if self.layout == "transposed":
            # As many rows as needed: what splits dim 0 of n times count elements into n still can.
            columns = 7 if self._count % 7 == 0 else 1
            return memory.view(columns, self._count // columns).t()
        if self.layout == "offset":
            return memory[3 : 3 + self._count]
        if self.layout == "scalar" and self._count == 1:
            return memory.view(())
        return memory

    def read(self):
        """The tensor on the CPU, as it is when what is queued on the current stream is over."""
        return self._view(self._memory.cpu())

    def stray_write(self):
        """What was written around the tensor, or None."""
        if self._count * self._dtype.itemsize == self._memory.numel():
            return None  # there is nothing around it
        memory = self._memory.cpu()
        clean = Placed(self._view(memory).contiguous().reshape(-1), self.layout)
        if same_bytes(clean._memory, memory):
            return None
        return f"memory around a {self.layout} tensor was written"


def blank(dtype, count, layout, rank=0, device="cpu"):
    """A place for an output: bytes that no right answer consists of, and no view of the input."""
    return Placed(None, layout, rank, device, dtype, count)
