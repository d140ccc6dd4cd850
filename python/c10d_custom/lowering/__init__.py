"""c10d's operations lowered to the primitives of a transport: tensors checked, made contiguous, and named in a Call.
Each operation's method of `Lowering` returns a Call, or a Message; UsageError where the arguments make no sense.

Where a tensor's memory is not its elements in order, a plain one stands in for it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from .. import dtypes
from ..call import ANY_COUNT, Call, Message, Op, Region, copy_back
from ..errors import UsageError
from ..native import direct

if TYPE_CHECKING:
    from ..call import Buffer


def is_plain(t: torch.Tensor) -> bool:
    """True if the tensor's bytes, in order, are its elements."""
    return t.is_contiguous() and not t.is_neg() and not t.is_conj()


def source(t: torch.Tensor) -> torch.Tensor:
    """``t``, or a plain copy of it."""
    return t if is_plain(t) else t.resolve_conj().resolve_neg().contiguous()


def target(t: torch.Tensor, call: Call | Message, what: str = "tensor") -> torch.Tensor:
    """``t``, or a plain tensor whose contents go to ``t`` at the end."""
    if is_plain(t):
        return t
    _require_room(call.name, t, what)
    plain = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    call.copy_back.append((t, plain))
    return plain


def target_with_input(t: torch.Tensor, call: Call) -> torch.Tensor:
    """The same for an operation that reads ``t``, too: one plain tensor for both."""
    plain = target(t, call)
    return plain if plain is t else plain.copy_(t.detach())


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of ``t`` lie in one place, as those of an expanded tensor do."""
    dims = sorted((stride, size) for stride, size in zip(t.stride(), t.size()) if size > 1)
    if not dims or not t.numel():
        return False
    reach, nested = 0, True  # of the dimensions so far: from their first element to the last
    for stride, size in dims:
        if stride == 0:
            return True
        nested &= stride > reach
        reach += stride * (size - 1)
    if nested:
        return False
    if reach < t.numel() - 1:
        return True
    # Dimensions that run into each other (as_strided makes such) may still miss each other everywhere.
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = (places.unsqueeze(1) + torch.arange(size, device="cpu") * stride).view(-1)
    taken = torch.zeros(reach + 1, dtype=torch.bool, device="cpu")
    taken[places] = True
    return int(taken.sum()) < t.numel()


def _require_room(name: str, t: torch.Tensor, what: str) -> None:
    """For an output. Raises UsageError where not each element has a place of its own."""
    if overlaps_itself(t):
        raise UsageError(
            f"{name}: {what} has elements that share memory (sizes {list(t.size())}, strides {list(t.stride())}), as "
            "an expanded tensor's do, and cannot take a result: give a clone() of it"
        )


def device_of(t: torch.Tensor) -> torch.device | None:
    """The torch.device of a tensor, None for the CPU."""
    return None if t.is_cpu else t.device


def only(tensors: torch.Tensor | Sequence[torch.Tensor] | None, name: str) -> torch.Tensor:
    """The one tensor of a list of one, as c10d passes most arguments."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if tensors is None:
        raise UsageError(f"{name}: got no tensor")
    if len(tensors) != 1:
        raise UsageError(f"{name}: expected one tensor for this rank, got {len(tensors)}")
    return tensors[0]


def own_list(lists: Sequence[Any]) -> Sequence[torch.Tensor]:
    """This rank's list of tensors, given plain or as the only list of a list."""
    return lists[0] if lists and not isinstance(lists[0], torch.Tensor) else lists


def own_tensors(tensors: Any) -> list[torch.Tensor]:
    """A list of its own of what c10d passes: nothing, a tensor, a list of some, or a list of such a list."""
    if type(tensors) is not list:
        return [] if tensors is None else [tensors]
    if tensors and type(tensors[0]) is torch.Tensor:
        return tensors[:]
    return list(own_list(tensors))


# Of the calls that torch's own groups count as changes of their outputs, which an autograd that has saved one wants to
# know of (call.Shape.counted).
COUNTED = frozenset(
    ("all_gather", "all_gather_into_tensor", "gather", "gather_single", "reduce_scatter", "reduce_scatter_tensor")
    + ("all_to_all",)
)


def count_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Counts changes of outputs. UsageError where torch refuses to."""
    try:
        direct.count_changes(tensors)
    except RuntimeError as error:
        raise UsageError(str(error)) from error


def put_back(call: Call | Message) -> None:
    """Copies the results of a call that is done to where its caller wants them."""
    if call.device is None:  # else done on the stream of the call
        copy_back(call.copy_back)


def check_tensor(name: str, t: torch.Tensor, what: str = "tensor") -> dtypes.DType:
    if not isinstance(t, torch.Tensor):
        raise UsageError(f"{name}: {what} is {type(t).__name__}, not a torch.Tensor")
    if t.layout is not torch.strided:
        raise UsageError(
            f"{name}: {what} has layout {t.layout}; only dense tensors can be communicated"
            + (" (all_reduce with SUM takes sparse COO tensors)" if t.is_sparse else "")
        )
    if not (t.is_cpu or t.is_cuda):
        raise UsageError(f"{name}: {what} is on {t.device}; only CPU and CUDA tensors can be communicated")
    if direct.stands_for_another(t):
        raise UsageError(
            f"{name}: {what}, a {type(t).__name__}, has no memory of its own; its keys are {torch._C._dispatch_keys(t)}"
        )
    if direct.is_freed(t):
        raise UsageError(f"{name}: {what} has {t.numel()} elements, but its storage has been freed (resized to 0)")
    return dtypes.lookup(t.dtype)


def check_device(name: str, t: torch.Tensor, like: torch.Tensor, what: str) -> None:
    if device_of(t) != device_of(like):
        raise UsageError(f"{name}: {what} is on {t.device}, the other tensors on {like.device}")


def check_one_device(name: str, calls: Sequence[Call]) -> None:
    """Refuse calls that are made in one and are not all on the same device."""
    for i, call in enumerate(calls):
        if call.device != calls[0].device:
            raise UsageError(
                f"{name}: tensor {i} of the list is on {call.device or 'cpu'}, tensor 0 on {calls[0].device or 'cpu'}; "
                "the tensors of one call must be on one device"
            )


def read_before_written(calls: Sequence[Call]) -> None:
    """Of calls made in one, which run one after the other: each reads what was there before any of them wrote, whatever
    memory they share, as where all are one message."""
    at = [(t.data_ptr(), t.data_ptr() + t.nbytes, i) for i, c in enumerate(calls) for t in (*c.inputs, *c.outputs)]
    high, last = 0, -1  # of those so far: the furthest end, and whose it is
    for begin, end, i in sorted(at):
        if begin < min(end, high) and i != last:
            break
        if end > high:
            high, last = end, i
    else:
        return
    for call in calls[1:]:
        given = [t for t in call.inputs if isinstance(t, torch.Tensor)]  # all are: nothing is staged so far
        inputs = [t.detach().clone() for t in given]
        if call.inputs is call.outputs:
            if call.copy_back:  # a tensor of its own stands in already
                continue
            call.copy_back = list(zip(given, inputs))
            call.outputs = inputs
        call.inputs = inputs


def check_list(name: str, tensors: Sequence[torch.Tensor], size: int, like: torch.Tensor, what: str) -> None:
    """``size`` tensors of the dtype of ``like``."""
    if len(tensors) != size:
        raise UsageError(f"{name}: {what} has {len(tensors)} tensors for a group of {size} ranks")
    for i, t in enumerate(tensors):
        check_tensor(name, t, f"{what}[{i}]")
        check_device(name, t, like, f"{what}[{i}]")
        if t.dtype is not like.dtype:
            raise UsageError(f"{name}: {what}[{i}] is {t.dtype}, the other tensors are {like.dtype}")


def check_alike(name: str, output: torch.Tensor, t: torch.Tensor) -> None:
    if output.dtype is not t.dtype:
        raise UsageError(f"{name}: output is {output.dtype}, input is {t.dtype}")
    check_device(name, output, t, "output")


def split_flat(name: str, flat: torch.Tensor, size: int, what: str) -> Sequence[torch.Tensor]:
    if flat.numel() % size:
        raise UsageError(f"{name}: {what} has {flat.numel()} elements, not a multiple of the {size} ranks")
    return flat.view(-1).split(flat.numel() // size) if flat.numel() else [flat.view(-1)] * size


def _call(op: Op, name: str, t: torch.Tensor, timeout: float, count: int = 0, what: str = "tensor") -> Call:
    return Call(op, name, check_tensor(name, t, what), timeout, count=count, device=device_of(t))


class Lowering:
    """Makes the calls of one group, on its ``rank`` of ``size``."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def _reducing(self, call: Call, op: Any) -> Call:
        code, factor = dtypes.split_op(op)
        dtypes.check_reduce(call.dtype, code)
        call.redop = code
        if factor is not None:
            call.factor = float(factor)
        return call

    def _rooted(self, op: Op, name: str, t: torch.Tensor, root: int, timeout: float) -> Call:
        call = _call(op, name, t, timeout, t.numel())
        if not 0 <= root < self.size:
            raise UsageError(f"{name}: root rank {root} is not in a group of {self.size} ranks")
        call.root = root
        return call

    def _check_whole(self, name: str, what: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """``whole``, the output or the input, has a part for each rank, as large as ``part``, the other of the two."""
        check_alike(name, *((whole, part) if what == "output" else (part, whole)))
        if whole.numel() != part.numel() * self.size:
            raise UsageError(
                f"{name}: {what} has {whole.numel()} elements, expected {part.numel()} x {self.size} ranks"
            )

    def barrier(self, device: torch.device | None, timeout: float) -> Call:
        return Call(Op.barrier, "barrier", dtypes.BY_DTYPE[torch.uint8], timeout, device=device)

    def nothing(self, device: torch.device, timeout: float, name: str) -> Call:
        """A collective of no elements: what the first on a device sets up, and no more."""
        none = [Region(0, 0, 0)]
        return Call(Op.all_reduce, name, dtypes.BY_DTYPE[torch.uint8], timeout, none, none, device=device)

    def broadcast(self, t: torch.Tensor, root: int, timeout: float) -> Call:
        call = self._rooted(Op.broadcast, "broadcast", t, root, timeout)
        if root == self.rank:
            call.inputs = [source(t)]
        else:
            call.outputs = [target(t, call)]
        return call

    def all_reduce(self, t: torch.Tensor, op: Any, timeout: float) -> Call:
        call = self._reducing(_call(Op.all_reduce, "all_reduce", t, timeout, t.numel()), op)
        call.inputs = call.outputs = [target_with_input(t, call)]
        return call

    def reduce(self, t: torch.Tensor, root: int, op: Any, timeout: float) -> Call:
        call = self._reducing(self._rooted(Op.reduce, "reduce", t, root, timeout), op)
        if root == self.rank:
            call.inputs = call.outputs = [target_with_input(t, call)]
        else:
            call.inputs = [source(t)]
        return call

    def all_gather(self, outputs: Sequence[torch.Tensor], t: torch.Tensor, timeout: float) -> Call:
        call = _call(Op.all_gather, "all_gather", t, timeout)
        check_list("all_gather", outputs, self.size, t, "output list")
        mine = outputs[self.rank].numel()
        if mine != t.numel():
            raise UsageError(f"all_gather: output[{self.rank}] has {mine} elements, this rank's input {t.numel()}")
        even = all(o.numel() == t.numel() for o in outputs)
        call.count = t.numel() if even else ANY_COUNT
        call.inputs = [source(t)]
        call.outputs = [self._apart(o, call.inputs, call, own=r == self.rank) for r, o in enumerate(outputs)]
        return call

    def all_gather_single(self, output: torch.Tensor, t: torch.Tensor, timeout: float) -> Call:
        name = "all_gather_into_tensor"
        check_tensor(name, output, "output")
        call = _call(Op.all_gather, name, t, timeout, t.numel(), "input")
        self._check_whole(name, "output", output, t)
        call.inputs = [source(t)]
        in_place = is_plain(output) and t.data_ptr() == output.data_ptr() + self.rank * t.nbytes
        whole = output if in_place else self._apart(output, call.inputs, call)
        call.outputs = split_flat(name, whole, self.size, "output")
        return call

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any, timeout: float) -> Call:
        name = "reduce_scatter"
        call = _call(Op.reduce_scatter, name, output, timeout, what="output")
        check_list(name, inputs, self.size, output, "input list")
        if inputs[self.rank].numel() != output.numel():
            raise UsageError(
                f"{name}: input[{self.rank}] has {inputs[self.rank].numel()} elements, the output {output.numel()}"
            )
        even = all(i.numel() == output.numel() for i in inputs)
        call.count = output.numel() if even else ANY_COUNT
        self._reducing(call, op)
        call.inputs = [source(i) for i in inputs]
        call.outputs = [self._scattered(output, call)]
        return call

    def reduce_scatter_single(self, output: torch.Tensor, t: torch.Tensor, op: Any, timeout: float) -> Call:
        name = "reduce_scatter_tensor"
        check_tensor(name, t, "input")
        call = _call(Op.reduce_scatter, name, output, timeout, output.numel(), "output")
        self._check_whole(name, "input", t, output)
        self._reducing(call, op)
        call.inputs = split_flat(name, source(t), self.size, "input")
        call.outputs = [self._scattered(output, call)]
        return call

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout: float) -> Call:
        name = "all_to_all"
        if not inputs or not outputs:
            counts = len(inputs or ()), len(outputs or ())
            raise UsageError(f"{name}: needs {self.size} inputs and outputs, got {counts[0]} and {counts[1]}")
        call = _call(Op.all_to_all, name, inputs[0], timeout, ANY_COUNT, "input[0]")
        check_list(name, inputs, self.size, inputs[0], "input list")
        check_list(name, outputs, self.size, inputs[0], "output list")
        self._own_part(name, inputs, outputs)
        call.inputs = [source(i) for i in inputs]
        call.outputs = [self._apart(o, call.inputs, call) for o in outputs]
        return call

    def all_to_all_single(
        self,
        output: torch.Tensor,
        t: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        timeout: float,
    ) -> Call:
        name = "all_to_all_single"
        check_tensor(name, output, "output")
        call = _call(Op.all_to_all, name, t, timeout, ANY_COUNT, "input")
        check_alike(name, output, t)
        call.inputs = self._split_rows(name, source(t), input_splits, "input")
        whole = self._apart(output, call.inputs, call)
        call.outputs = self._split_rows(name, whole, output_splits, "output")
        self._own_part(name, call.inputs, call.outputs)
        return call

    def gather(self, outputs: Sequence[torch.Tensor], t: torch.Tensor, root: int, timeout: float) -> Call:
        call = self._rooted(Op.gather, "gather", t, root, timeout)
        call.inputs = [source(t)]
        if root == self.rank:
            check_list("gather", outputs, self.size, t, "gather list")
            self._own_part("gather", [t] * self.size, outputs)
            self._count_parts(call, outputs)
            call.outputs = [self._apart(o, call.inputs, call, own=r == root) for r, o in enumerate(outputs)]
        elif outputs:
            raise UsageError(f"gather: rank {self.rank} is not the root and gives a gather list")
        return call

    def gather_single(self, output: torch.Tensor, t: torch.Tensor, root: int, timeout: float) -> Call:
        name = "gather_single"
        call = self._rooted(Op.gather, name, t, root, timeout)
        call.inputs = [source(t)]
        if root == self.rank:
            check_tensor(name, output, "output")
            self._check_whole(name, "output", output, t)
            call.outputs = split_flat(name, self._apart(output, call.inputs, call), self.size, "output")
        return call

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, timeout: float) -> Call:
        call = self._rooted(Op.scatter, "scatter", output, root, timeout)
        if root == self.rank:
            check_list("scatter", inputs, self.size, output, "scatter list")
            self._own_part("scatter", inputs, [output] * self.size)
            self._count_parts(call, inputs)
            call.inputs = [source(i) for i in inputs]
        elif inputs:
            raise UsageError(f"scatter: rank {self.rank} is not the root and gives a scatter list")
        call.outputs = [self._scattered(output, call)]
        return call

    def monitored_barrier(self, timeout: float) -> Call:
        """Tells the ranks which are in a collective instead that this one is in a monitored barrier."""
        return Call(Op.monitored_barrier, "monitored_barrier", dtypes.BY_DTYPE[torch.uint8], timeout)

    def rejected(self, timeout: float) -> Call:
        """Tells the other ranks that this rank's call was refused, so that none waits for it."""
        return Call(Op.rejected, "rejected", dtypes.BY_DTYPE[torch.uint8], timeout)

    def message(self, name: str, t: torch.Tensor, peer: int, tag: int, timeout: float, is_recv: bool) -> Message:
        dtype = check_tensor(name, t)
        if peer >= self.size or peer < -1:
            raise UsageError(f"{name}: rank {peer} is not in a group of {self.size} ranks")
        message = Message(name, t, dtype, peer, tag, timeout, is_recv, device_of(t))
        message.tensor = target(t, message) if is_recv else source(t)
        return message

    # --- parts

    def _apart(self, output: torch.Tensor, inputs: Sequence[Buffer], call: Call, own: bool = False) -> torch.Tensor:
        """``output``, or a stand-in where it shares memory with an input and would be written while
        that is still read. ``own``: an input at the same address is no reason, for what is written there comes from
        there."""
        plain = target(output, call, "output")
        low, high = plain.data_ptr(), plain.data_ptr() + plain.nbytes
        for t in inputs:
            at = t.data_ptr()
            if at < high and low < at + t.nbytes and not (own and at == low):
                stand_in = torch.empty_like(plain)
                call.copy_back.append((output, stand_in))
                return stand_in
        return plain

    def _scattered(self, output: torch.Tensor, call: Call) -> torch.Tensor:
        """The one output of a call with an input for each rank: it may be this rank's own input."""
        others = [t for r, t in enumerate(call.inputs) if r != self.rank]
        plain = self._apart(output, others, call)
        return self._apart(plain, call.inputs[self.rank : self.rank + 1], call, own=True) if plain is output else plain

    def _own_part(self, name: str, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        here, there = inputs[self.rank].numel(), outputs[self.rank].numel()
        if here != there:
            raise UsageError(f"{name}: this rank sends {here} elements to itself and expects {there}")

    def _count_parts(self, call: Call, parts: Sequence[torch.Tensor]) -> None:
        """Of a gather or scatter, at the root, whose ``count`` is that of its own part."""
        other = next((r for r, t in enumerate(parts) if t.numel() != call.count), None)
        if other is None:
            return
        if call.device is not None:
            raise UsageError(
                f"{call.name}: parts of different sizes are for CPU tensors only: "
                f"on {call.device}, that of rank {other} has {parts[other].numel()} elements, this rank's {call.count}"
            )
        call.count = ANY_COUNT

    def _split_rows(self, name: str, t: torch.Tensor, splits: Sequence[int], what: str) -> Sequence[torch.Tensor]:
        if not splits:
            if t.dim() and t.size(0) % self.size:
                raise UsageError(
                    f"{name}: {what}'s first dimension, {t.size(0)}, is not a multiple of the {self.size} ranks"
                )
            return split_flat(name, t, self.size, what)
        try:
            splits = [index(split) for split in splits]
        except TypeError:
            raise UsageError(f"{name}: {what} splits {list(splits)} are not all whole numbers") from None
        if len(splits) != self.size or min(splits) < 0 or (t.size(0) if t.dim() else 1) != sum(splits):
            raise UsageError(
                f"{name}: {what} splits {list(splits)} do not cover a first dimension of "
                f"{t.size(0) if t.dim() else 'none'} over {self.size} ranks"
            )
        rows = t.size(0) if t.dim() else 1
        per_row = t.numel() // rows if rows else 0
        return t.view(-1).split([s * per_row for s in splits]) if t.numel() else [t.view(-1)] * self.size
