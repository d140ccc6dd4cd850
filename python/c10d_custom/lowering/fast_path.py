"""The fast path of synchronous collectives and of messages to the core: of plain CPU tensors in equal parts, as most
are. What a Call and its checks cost is many times what the core takes for a few bytes, and where ranks share a core it
is paid by one after the other.

Each function returns False, having done nothing, where the call is of another kind or makes no sense: the slow path
(issuing.py) takes the one and says what is wrong with the other. True once it is done; raises as the slow path does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from .. import dtypes, native
from ..call import Call, Op
from .raw_tensor import raw_parts, raw_tensor

if TYPE_CHECKING:
    import torch

    from ..transport.base import FastCollective, FastMessage, Ticket, Transport
    from .collectives import Lowering


_MOVED = dtypes.MOVED
_BARRIER, _BROADCAST, _REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _GATHER, _SCATTER = (
    op << 24
    for op in (
        Op.barrier,
        Op.broadcast,
        Op.reduce,
        Op.all_gather,
        Op.reduce_scatter,
        Op.all_to_all,
        Op.gather,
        Op.scatter,
    )
)
_INPUTS, _OUTPUTS = native.LISTED_INPUTS, native.LISTED_OUTPUTS


class _Fast(Protocol):
    """A Transport while its fast paths are there."""

    fast_collective: FastCollective
    fast_message: FastMessage

    def last_error(self, call: Call) -> BaseException: ...


class FastPath:
    """Of one group. ``lower``: its Lowering. To be asked only while ``transport`` has the path in question. ``ns``: the
    call's time-out in nanoseconds."""

    def __init__(self, transport: Transport, lower: Lowering) -> None:
        self._transport, self._lower = cast(_Fast, transport), lower
        self._rank, self._size = transport.rank, transport.size

    def barrier(self, ns: int) -> bool:
        status = self._transport.fast_collective(_BARRIER | 1 << 16, -1, None, None, 0, ns)
        return not status or self._over(status, ns, self._lower.barrier, None)

    def broadcast(self, t: torch.Tensor, root: int, ns: int) -> bool:
        if not (0 <= root < self._size and (found := raw_tensor(t)) and found[1]):
            return False
        at, count, code = found
        source: int | None
        target: int | None
        source, target = (at, None) if root == self._rank else (None, at)
        status = self._transport.fast_collective(_MOVED[code] | _BROADCAST, root, source, target, count, ns)
        return not status or self._over(status, ns, self._lower.broadcast, t, root)

    def reduce(self, t: torch.Tensor, root: int, op: Any, ns: int) -> bool:
        if not (
            0 <= root < self._size and (found := raw_tensor(t)) and found[1] and (kind := dtypes.kind_of(found[2], op))
        ):
            return False
        at = found[0]
        status = self._transport.fast_collective(
            kind.packed | _REDUCE, root, at, at if root == self._rank else None, found[1], ns
        )
        return not status or self._over(status, ns, self._lower.reduce, t, root, op)

    def all_gather(self, outputs: Sequence[torch.Tensor], t: torch.Tensor, ns: int) -> bool:
        if not (
            (found := raw_tensor(t)) and found[1] and (targets := raw_parts(outputs, self._size, found[2], found[1]))
        ):
            return False
        status = self._transport.fast_collective(
            _MOVED[found[2]] | _ALL_GATHER | _OUTPUTS, -1, found[0], targets, found[1], ns
        )
        return not status or self._over(status, ns, self._lower.all_gather, outputs, t)

    def all_gather_single(self, output: torch.Tensor, t: torch.Tensor, ns: int) -> bool:
        if not ((found := raw_tensor(t)) and found[1] and (target := self._whole(output, found))):
            return False
        status = self._transport.fast_collective(_MOVED[found[2]] | _ALL_GATHER, -1, found[0], target, found[1], ns)
        return not status or self._over(status, ns, self._lower.all_gather_single, output, t)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any, ns: int) -> bool:
        if not (
            (found := raw_tensor(output))
            and found[1]
            and (kind := dtypes.kind_of(found[2], op))
            and (sources := raw_parts(inputs, self._size, found[2], found[1]))
        ):
            return False
        status = self._transport.fast_collective(
            kind.packed | _REDUCE_SCATTER | _INPUTS, -1, sources, found[0], found[1], ns
        )
        return not status or self._over(status, ns, self._lower.reduce_scatter, output, inputs, op)

    def reduce_scatter_single(self, output: torch.Tensor, t: torch.Tensor, op: Any, ns: int) -> bool:
        if not (
            (found := raw_tensor(output))
            and found[1]
            and (kind := dtypes.kind_of(found[2], op))
            and (source := self._whole(t, found))
        ):
            return False
        status = self._transport.fast_collective(kind.packed | _REDUCE_SCATTER, -1, source, found[0], found[1], ns)
        return not status or self._over(status, ns, self._lower.reduce_scatter_single, output, t, op)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], ns: int) -> bool:
        if not (
            inputs
            and (found := raw_tensor(inputs[0]))
            and found[1]
            and (sources := raw_parts(inputs, self._size, found[2], found[1]))
            and (targets := raw_parts(outputs, self._size, found[2], found[1]))
        ):
            return False
        status = self._transport.fast_collective(
            _MOVED[found[2]] | _ALL_TO_ALL | _INPUTS | _OUTPUTS, -1, sources, targets, found[1], ns
        )
        return not status or self._over(status, ns, self._lower.all_to_all, outputs, inputs)

    def all_to_all_single(self, output: torch.Tensor, t: torch.Tensor, ns: int) -> bool:
        if not (
            (found := raw_tensor(t))
            and (target := raw_tensor(output))
            and found[1]
            and found[1:] == target[1:]
            and t.dim()
            and output.dim()
            and not t.size(0) % self._size
            and not output.size(0) % self._size
        ):
            return False
        status = self._transport.fast_collective(
            _MOVED[found[2]] | _ALL_TO_ALL, -1, found[0], target[0], found[1] // self._size, ns
        )
        return not status or self._over(status, ns, self._lower.all_to_all_single, output, t, [], [])

    def gather(self, outputs: Sequence[torch.Tensor], t: torch.Tensor, root: int, ns: int) -> bool:
        if not (0 <= root < self._size and (found := raw_tensor(t)) and found[1]):
            return False
        targets = None
        if root == self._rank:
            targets = raw_parts(outputs, self._size, found[2], found[1])
            if not targets:
                return False
        elif outputs:
            return False
        status = self._transport.fast_collective(
            _MOVED[found[2]] | _GATHER | _OUTPUTS, root, found[0], targets, found[1], ns
        )
        return not status or self._over(status, ns, self._lower.gather, outputs, t, root)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, ns: int) -> bool:
        if not (0 <= root < self._size and (found := raw_tensor(output)) and found[1]):
            return False
        sources = None
        if root == self._rank:
            sources = raw_parts(inputs, self._size, found[2], found[1])
            if not sources:
                return False
        elif inputs:
            return False
        status = self._transport.fast_collective(
            _MOVED[found[2]] | _SCATTER | _INPUTS, root, sources, found[0], found[1], ns
        )
        return not status or self._over(status, ns, self._lower.scatter, output, inputs, root)

    def message(
        self, name: str, t: torch.Tensor, peer: int, tag: int, ns: int, is_recv: bool
    ) -> Ticket | Literal[False] | None:
        """None for a message that is over, else its Ticket."""
        if not (type(peer) is type(tag) is int and 0 <= peer < self._size and (found := raw_tensor(t)) and found[1]):
            return False
        at, count, code = found
        return self._transport.fast_message(
            _MOVED[code] | native.RECEIVED if is_recv else _MOVED[code],
            peer,
            tag,
            at,
            count,
            ns,
            partial(self._lower.message, name, t, peer, tag, ns / 1e9, is_recv),
        )

    def _whole(self, t: torch.Tensor, part: tuple[int, int, int]) -> int | None:
        """The address of ``t`` if it is as many as there are ranks of ``part``, which `raw_tensor` has found."""
        found = raw_tensor(t)
        return found and found[2] == part[2] and found[1] == part[1] * self._size and found[0]

    def _over(self, status: int, ns: int, lower: Callable[..., Call], *arguments: Any) -> Literal[False]:
        if status == native.PENDING:
            return False
        raise self._transport.last_error(lower(*arguments, ns / 1e9))
