"""The short way of synchronous collectives to the core: of plain CPU tensors in equal parts, as most are. What a Call and
its checks cost is many times what the core takes for a few bytes, and where ranks share a core it is paid by one after
the other.

Each function returns False, having done nothing, where the call is of another kind or makes no sense: the long way
(process_group) takes the one and says what is wrong with the other. True once it is done; raises as the long way does.
"""
from array import array

import torch

from . import dtypes
from .call import Op
from .transport import native

_STRIDED, _MOVED = torch.strided, dtypes.MOVED
_BARRIER, _BROADCAST, _REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _GATHER, _SCATTER = (
    op << 24 for op in (Op.barrier, Op.broadcast, Op.reduce, Op.all_gather, Op.reduce_scatter, Op.all_to_all, Op.gather,
                        Op.scatter))
_INPUTS, _OUTPUTS = native.LISTED_INPUTS, native.LISTED_OUTPUTS


def is_ordinary(t):
    """True for a tensor of which the core needs no more than its address."""
    return (isinstance(t, torch.Tensor) and t.is_cpu and t.layout is _STRIDED
            and t.is_contiguous() and not t.is_neg() and not t.is_conj())  # is_plain, without the price of its call


class Quick:
    """Of one group. ``transport`` has a way `quick`; ``lower``: its Lowering."""

    def __init__(self, transport, lower):
        self._transport, self._lower = transport, lower
        self._rank, self._size = transport.rank, transport.size

    def barrier(self, ns):
        status = self._transport.quick(_BARRIER | 1 << 16, -1, None, None, 0, ns)
        return not status or self._over(status, ns, self._lower.barrier, None)

    def broadcast(self, t, root, ns):
        if not (0 <= root < self._size and is_ordinary(t) and (count := t.numel()) and (moved := _MOVED.get(t.dtype))):
            return False
        at = t.data_ptr()
        source, target = (at, None) if root == self._rank else (None, at)
        status = self._transport.quick(moved | _BROADCAST, root, source, target, count, ns)
        return not status or self._over(status, ns, self._lower.broadcast, t, root)

    def reduce(self, t, root, op, ns):
        if not (0 <= root < self._size and is_ordinary(t) and (count := t.numel()) and (kind := dtypes.kind_of(t.dtype, op))):
            return False
        at = t.data_ptr()
        status = self._transport.quick(kind.packed | _REDUCE, root, at, at if root == self._rank else None, count, ns)
        return not status or self._over(status, ns, self._lower.reduce, t, root, op)

    def all_gather(self, outputs, t, ns):
        if not (is_ordinary(t) and (count := t.numel()) and (moved := _MOVED.get(t.dtype))
                and (parts := self._parts(outputs, t.dtype, count))):
            return False
        status = self._transport.quick(moved | _ALL_GATHER | _OUTPUTS, -1, t.data_ptr(),
                                       parts.buffer_info()[0], count, ns)
        return not status or self._over(status, ns, self._lower.all_gather, outputs, t)

    def all_gather_single(self, output, t, ns):
        if not (is_ordinary(t) and (count := t.numel()) and (moved := _MOVED.get(t.dtype)) and self._whole(output, t.dtype, count)):
            return False
        status = self._transport.quick(moved | _ALL_GATHER, -1, t.data_ptr(), output.data_ptr(), count, ns)
        return not status or self._over(status, ns, self._lower.all_gather_single, output, t)

    def reduce_scatter(self, output, inputs, op, ns):
        if not (is_ordinary(output) and (count := output.numel()) and (kind := dtypes.kind_of(output.dtype, op))
                and (parts := self._parts(inputs, output.dtype, count))):
            return False
        status = self._transport.quick(kind.packed | _REDUCE_SCATTER | _INPUTS, -1, parts.buffer_info()[0],
                                       output.data_ptr(), count, ns)
        return not status or self._over(status, ns, self._lower.reduce_scatter, output, inputs, op)

    def reduce_scatter_single(self, output, t, op, ns):
        if not (is_ordinary(output) and (count := output.numel()) and (kind := dtypes.kind_of(output.dtype, op))
                and self._whole(t, output.dtype, count)):
            return False
        status = self._transport.quick(kind.packed | _REDUCE_SCATTER, -1, t.data_ptr(), output.data_ptr(), count, ns)
        return not status or self._over(status, ns, self._lower.reduce_scatter_single, output, t, op)

    def all_to_all(self, outputs, inputs, ns):
        if not (inputs and is_ordinary(inputs[0]) and (count := inputs[0].numel())
                and (moved := _MOVED.get(inputs[0].dtype))):
            return False
        dtype = inputs[0].dtype
        if not ((sources := self._parts(inputs, dtype, count)) and (targets := self._parts(outputs, dtype, count))):
            return False
        status = self._transport.quick(moved | _ALL_TO_ALL | _INPUTS | _OUTPUTS, -1, sources.buffer_info()[0],
                                       targets.buffer_info()[0], count, ns)
        return not status or self._over(status, ns, self._lower.all_to_all, outputs, inputs)

    def all_to_all_single(self, output, t, ns):
        if not (is_ordinary(t) and t.dim() and (rows := t.size(0)) and not rows % self._size and (moved := _MOVED.get(t.dtype))):
            return False
        count = t.numel() // self._size
        if not (count and self._whole(output, t.dtype, count) and output.dim() and not output.size(0) % self._size):
            return False
        status = self._transport.quick(moved | _ALL_TO_ALL, -1, t.data_ptr(), output.data_ptr(), count, ns)
        return not status or self._over(status, ns, self._lower.all_to_all_single, output, t, [], [])

    def gather(self, outputs, t, root, ns):
        if not (0 <= root < self._size and is_ordinary(t) and (count := t.numel()) and (moved := _MOVED.get(t.dtype))):
            return False
        target = None
        if root == self._rank:
            if not (parts := self._parts(outputs, t.dtype, count)):
                return False
            target = parts.buffer_info()[0]
        elif outputs:
            return False
        status = self._transport.quick(moved | _GATHER | _OUTPUTS, root, t.data_ptr(), target, count, ns)
        return not status or self._over(status, ns, self._lower.gather, outputs, t, root)

    def scatter(self, output, inputs, root, ns):
        if not (0 <= root < self._size and is_ordinary(output) and (count := output.numel())
                and (moved := _MOVED.get(output.dtype))):
            return False
        source = None
        if root == self._rank:
            if not (parts := self._parts(inputs, output.dtype, count)):
                return False
            source = parts.buffer_info()[0]
        elif inputs:
            return False
        status = self._transport.quick(moved | _SCATTER | _INPUTS, root, source, output.data_ptr(), count, ns)
        return not status or self._over(status, ns, self._lower.scatter, output, inputs, root)

    # --- parts

    def _parts(self, tensors, dtype, count):
        """The addresses of ``tensors``, one for each rank, of ``count`` elements each; None if they are not such."""
        if len(tensors) != self._size:
            return None
        for t in tensors:
            if not (is_ordinary(t) and t.dtype is dtype and t.numel() == count):
                return None
        return array("Q", [t.data_ptr() for t in tensors])

    def _whole(self, t, dtype, count):
        return is_ordinary(t) and t.dtype is dtype and t.numel() == count * self._size

    def _over(self, status, ns, lower, *arguments):
        if status == native.PENDING:
            return False
        raise self._transport.cpu.last_error(lower(*arguments, ns / 1e9))
