"""Memory of every rank's GPU that all ranks of a p2p group reach: fused kernels read tensors there where they lie, and
stage nothing.

It is our own, for what others have open must stay until they have closed it: a rank gives it back when the group has
ended on all ranks, and its last tensor is gone. All ranks make it at once, and number it alike: by that number, and the
place in it, their kernels see that they call with the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...call import Op
from ...errors import TransportError, UsageError
from . import algorithm
from .p2p import Lie

if TYPE_CHECKING:
    import torch

    from ...call import Call
    from .driver import Driver

_WHOLE = 2 << 20  # CUDA cuts smaller allocations from one block, and exports all of that


class _Own:
    """Memory of this rank's, which whoever needs it keeps."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver, self.address = driver, 0
        self.address = driver.allocate(nbytes)

    def __del__(self) -> None:
        if self.address:
            with self._driver.activate():
                self._driver.free(self.address)


class _Region:
    """``low``: where this rank's tensors see it; ``nbytes``: 0 until all ranks have it; ``at``: of each rank's, where
    this rank's kernels reach it, 0: nowhere."""

    low = nbytes = 0

    def __init__(self, own: list[_Own], at: list[int]) -> None:
        self.own, self.at = own, at


class Registered:
    """One rank's end. Not while a call of the group is under way: `make`, `close_imports`, `free`."""

    def __init__(self, driver: Driver, rank: int, size: int) -> None:
        self._driver, self._rank, self._size = driver, rank, size
        self._regions: list[_Region] = []

    def make(self, nbytes: int, together: Callable[[Callable[[], Any]], tuple[Any, str | None]]) -> torch.Tensor:
        """A tensor of so many bytes, the same on all ranks, which all call this. ``together(step)``: of host_exchange.
        Raises on all ranks if it does on one."""
        own: list[_Own] = []
        region = _Region(own, [0] * self._size)

        def allocate() -> tuple[int, str]:
            own.append(_Own(self._driver, -(-nbytes // _WHOLE) * _WHOLE))
            return nbytes, self._driver.export_memory(own[0].address).hex()

        def open_them() -> None:
            for rank, (_, handle) in enumerate(given):
                mine = rank == self._rank
                region.at[rank] = own[0].address if mine else self._driver.open_memory(bytes.fromhex(handle))

        given, problem = together(allocate)
        if problem is None:
            if len({asked for asked, _ in given}) > 1:
                sizes = ", ".join(f"rank {r}: {asked}" for r, (asked, _) in enumerate(given))
                raise UsageError(
                    f"empty: all ranks ask for the same at once on a GPU, not for different bytes ({sizes})"
                )
            self._regions.append(region)  # from here on kept, whatever fails
            _, problem = together(open_them)
            if problem is not None:
                together(functools.partial(self._close, region.at))
                self._regions.remove(region)  # nobody has it open any more
        if problem is not None:
            raise TransportError(f"empty: not all ranks have GPU memory that all reach: {problem}")
        tensor = self._driver.tensor(own[0].address, nbytes, own[0])
        region.low, region.nbytes = tensor.data_ptr(), nbytes
        return tensor

    def located(self, call: Call) -> Lie | None:
        """If its tensors are to be read where they lie: where."""
        if not self._regions:
            return None
        inputs, outputs = ([t.data_ptr() for t in side] for side in (call.inputs, call.outputs))
        nbytes = whole = call.count * call.dtype.item_bytes
        low, each = next(iter([*inputs, *outputs]), 0), 0
        parts: Sequence[int] = []  # of one tensor, of those that are read
        if call.op is Op.all_gather and low == outputs[self._rank]:
            low, each, parts = outputs[0], nbytes, outputs
        elif call.op is Op.reduce_scatter:
            parts = inputs
        if parts:
            whole *= self._size
            if nbytes % 16 or any(part != low + r * nbytes for r, part in enumerate(parts)):
                return None
        # Nobody writes what another may still read: a rank writes to its own part, or outside of what is read.
        own = parts[self._rank] if parts else low
        if each == 0 and any(low - nbytes < to < low + whole and to != own for to in outputs):
            return None
        if call.op is Op.all_reduce and inputs != outputs or whole <= algorithm.one_shot_bytes(self._size):
            return None  # where they are short, one more barrier costs more
        for number, region in enumerate(self._regions, 1):
            offset = low - region.low
            if offset % 16 == 0 and 0 <= offset <= region.nbytes - whole:
                return Lie([at + offset + r * each for r, at in enumerate(region.at)], (number, offset))
        return None

    def close_imports(self) -> None:
        for region in self._regions:
            self._close(region.at)

    def _close(self, at: list[int]) -> None:
        for rank, address in enumerate(at):
            if address and rank != self._rank:
                at[rank] = 0
                self._driver.close_memory(address)

    def free(self) -> None:
        """All ranks have closed."""
        self._regions = []
