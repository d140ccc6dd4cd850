"""What a program can hand an operation, and who can look on: operations, kinds of tensors and modes, as tables.

A *cell* is one operation on tensors of one kind under one mode. Its *outcome* on a group is what came of it, as plain
data: ("gives", values, what the mode has seen) or ("refuses", the error)."""

import contextlib
import itertools
import pickle
import re
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 2
_tags = itertools.count()  # alike on both ranks


class Cell:
    """What an operation's body needs: the group, this rank, and how to make its tensors."""

    def __init__(self, group, kind="plain", outputs=False, asynchronous=False):
        self.group, self.rank = group, dist.get_rank()
        self.asynchronous = asynchronous
        self._wrap, self._outputs = KINDS[kind], outputs
        self.tag = next(_tags)  # a message that its receiver has refused is not to be taken for a later cell's

    @property
    def other(self):
        return 1 - self.rank

    def mine(self, x):
        return self._wrap(x, self)

    def empty(self, x):
        return self._wrap(x * 0, self) if self._outputs else x * 0

    def done(self, work):
        if self.asynchronous and work is not None:
            work.wait()


# --- operations: (tensor, Cell) -> what the call leaves


def _in_place(call):
    def operation(x, c):
        t = c.mine(x)
        c.done(call(t, c))
        return [t]

    return operation


def _one_to_many(call):
    def operation(x, c):
        outputs = [c.empty(x) for _ in range(SIZE)]
        c.done(call(outputs, c.mine(x), c))
        return outputs

    return operation


def _many_to_one(call):
    def operation(x, c):
        output = c.empty(x)
        c.done(call(output, [c.mine(x + i) for i in range(SIZE)], c))
        return [output]

    return operation


def _gather(outputs, t, c):
    return dist.gather(t, outputs if c.rank == 0 else None, 0, c.group, c.asynchronous)


def _scatter(output, inputs, c):
    return dist.scatter(output, inputs if c.rank == 0 else None, 0, c.group, c.asynchronous)


def _all_gather_into_tensor(x, c):
    output = c.empty(torch.cat([x] * SIZE))
    c.done(dist.all_gather_into_tensor(output, c.mine(x), c.group, c.asynchronous))
    return [output]


def _reduce_scatter_tensor(x, c):
    output = c.empty(x)
    c.done(dist.reduce_scatter_tensor(output, c.mine(torch.cat([x] * SIZE)), group=c.group, async_op=c.asynchronous))
    return [output]


def _all_to_all(x, c):
    outputs = [c.empty(x) for _ in range(SIZE)]
    c.done(dist.all_to_all(outputs, [c.mine(x + i) for i in range(SIZE)], c.group, c.asynchronous))
    return outputs


def _all_to_all_single(x, c):
    output = c.empty(torch.cat([x] * SIZE))
    whole = c.mine(torch.cat([x, x + 1]))
    c.done(dist.all_to_all_single(output, whole, group=c.group, async_op=c.asynchronous))
    return [output]


def _all_reduce_coalesced(x, c):
    tensors = [c.mine(x), c.mine(x + 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        work = dist.all_reduce_coalesced(tensors, group=c.group, async_op=c.asynchronous)
    if c.asynchronous and work is not None:
        work.wait()
    return tensors


def _coalescing_manager(x, c):
    tensors = [c.mine(x), c.mine(x + 1)]
    with dist._coalescing_manager(c.group, async_ops=c.asynchronous) as work:
        for t in tensors:
            dist.all_reduce(t, group=c.group)
    if c.asynchronous:
        work.wait()
    return tensors


def _barrier(x, c):
    c.done(dist.barrier(c.group, c.asynchronous))
    return []


def _message(x, c):
    if c.rank == 0:
        t = c.mine(x)
        dist.isend(t, 1, c.group, c.tag).wait() if c.asynchronous else dist.send(t, 1, c.group, c.tag)
        return []
    t = c.mine(x * 0)
    dist.irecv(t, 0, c.group, c.tag).wait() if c.asynchronous else dist.recv(t, 0, c.group, c.tag)
    return [t]


def _batch(x, c):
    t = c.mine(x)
    into = c.mine(x * 0)
    operations = [
        dist.P2POp(dist.isend, t, c.other, c.group, c.tag),
        dist.P2POp(dist.irecv, into, c.other, c.group, c.tag),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [into]


def _objects(x, c):
    found = [None] * SIZE
    dist.all_gather_object(found, ("of", c.rank, c.mine(x)), c.group)
    return [found[c.other][2]]


def _object_list(x, c):
    mine = c.mine(x)
    pickle.dumps(mine)  # what rank 0 cannot send, rank 1 would wait for
    objects = [mine, "text"] if c.rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0, c.group)
    return objects[:1]


def _functional(x, c):
    return [functional.all_reduce(c.mine(x), "sum", c.group)]


OPERATIONS = {
    "all_reduce": _in_place(lambda t, c: dist.all_reduce(t, group=c.group, async_op=c.asynchronous)),
    "broadcast": _in_place(lambda t, c: dist.broadcast(t, 0, c.group, c.asynchronous)),
    "reduce": lambda x, c: _reduced(x, c),
    "all_gather": _one_to_many(lambda o, t, c: dist.all_gather(o, t, c.group, c.asynchronous)),
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _one_to_many(_gather),
    "scatter": _many_to_one(_scatter),
    "reduce_scatter": _many_to_one(lambda o, i, c: dist.reduce_scatter(o, i, group=c.group, async_op=c.asynchronous)),
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "coalescing_manager": _coalescing_manager,
    "barrier": _barrier,
    "message": _message,
    "batch_isend_irecv": _batch,
    "all_gather_object": _objects,
    "broadcast_object_list": _object_list,
    "functional": _functional,
}
NO_ASYNC = "batch_isend_irecv", "all_gather_object", "broadcast_object_list", "functional"


def _reduced(x, c):
    t = c.mine(x)
    c.done(dist.reduce(t, 0, group=c.group, async_op=c.asynchronous))
    return [t] if c.rank == 0 else []  # gloo leaves anything elsewhere


# --- kinds of tensors: (plain tensor, Cell) -> one of that kind with the same values


class Wrapper(torch.Tensor):
    """Has its values in another tensor, and hands operations on to it."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        tree = torch.utils._pytree
        args, kwargs = tree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        return Wrapper, (self.inner,)


class Silent(Wrapper):
    """The same without a word of what it would do."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a Silent")


class Named(torch.Tensor):
    """A class of somebody's own, with memory of its own."""


class Watchful(torch.Tensor):
    """Is told of every torch function that is called on it."""

    seen = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs)


def _dtensor(t, c):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = _made.setdefault("mesh", None) or init_device_mesh("cpu", (SIZE,))
    _made["mesh"] = mesh
    return DTensor.from_local(t, mesh, [Replicate()], run_check=False)


def _fake(t, c):
    from torch._subclasses.fake_tensor import FakeTensorMode

    _made.setdefault("fake", FakeTensorMode(allow_non_fake_inputs=True))
    return _made["fake"].from_tensor(t)


def _two(t, c):
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(t.clone(), t.clone())


def _masked(t, c):
    from torch.masked import masked_tensor

    return masked_tensor(t.clone(), torch.ones(t.shape, dtype=torch.bool))


def _inference(t, c):
    with torch.inference_mode():
        return t.clone()


_made = {}  # of this process
KINDS = {
    "plain": lambda t, c: t.clone(),
    "parameter": lambda t, c: torch.nn.Parameter(t.clone()),
    "in a graph": lambda t, c: t.clone().requires_grad_() * 1,
    "asynchronous": lambda t, c: functional.AsyncCollectiveTensor(t.clone()),
    "DTensor": _dtensor,
    "fake": _fake,
    "TwoTensor": _two,
    "masked": _masked,
    "wrapper": lambda t, c: Wrapper(t.clone()),
    "silent": lambda t, c: Silent(t.clone()),
    "zero": lambda t, c: torch._efficientzerotensor(tuple(t.shape)),
    "functional": lambda t, c: torch._to_functional_tensor(t.clone()),
    "negative": lambda t, c: torch._neg_view(-t),
    "conjugate": lambda t, c: torch.complex(t, t).conj(),
    "complex": lambda t, c: torch.complex(t, -t),
    "zeros": lambda t, c: torch.zeros_like(t),
    "named": lambda t, c: t.clone().as_subclass(Named),
    "watchful": lambda t, c: t.clone().as_subclass(Watchful),
    "meta": lambda t, c: t.to("meta"),
    "inference": _inference,
}

# --- modes: (operation's body, tensor) -> (what it gives, what the mode has seen)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in str(function):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.device:
            self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


def _within(make, seen=lambda mode: None):
    def under(body, x):
        with make() as mode:
            got = body(x)
        return got, seen(mode)

    return under


def _comm_debug():
    from torch.distributed.tensor.debug import CommDebugMode

    return CommDebugMode()


def _fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def _profiled(body, x):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = body(x)
    return got, sorted({e.key for e in profile.key_averages() if "c10d::" in e.key})


def _sum(body):
    return lambda x: sum((t.sum() for t in body(x + 0)), (x * 0).sum())


def _grad(body, x):
    return [torch.func.grad(_sum(body))(x)], None


def _vmap(body, x):
    return list(torch.func.vmap(lambda t: tuple(body(t)))(torch.stack([x, x]))), None


def _functionalized(body, x):
    return list(torch.func.functionalize(lambda t: tuple(body(t + 0)))(x)), None


def _traced(body, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda t: tuple(body(t + 0)), (x,))
    return list(traced(x)), None


def _nodes(graph):
    return [str(n.target) for n in graph.nodes if "c10d" in str(n.target)]


def _make_fx(body, x):
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(lambda t: body(t + 0))(x)
    module(x)  # and nobody waits for what its operations have begun
    dist.barrier()
    return [], _nodes(module.graph)


def _exported(body, x):
    class Module(torch.nn.Module):
        def forward(self, t):
            return tuple(body(t + 0))

    program = torch.export.export(Module(), (x,), strict=False)
    program.module()(x)
    dist.barrier()
    return [], _nodes(program.graph)


def _saved(body, x):
    """Every output is saved by autograd and then written to by the operation."""
    w = x.clone().requires_grad_()
    y = w * 1
    z = y * y
    with torch.no_grad():
        body(y)
    z.sum().backward()
    return [w.grad], None


MODES = {
    "none": lambda body, x: (body(x), None),
    "dispatch": _within(Seen, lambda mode: mode.seen),
    "CommDebugMode": _within(_comm_debug, lambda mode: mode.get_total_counts()),
    "functions": _within(SeenFunctions, lambda mode: mode.seen),
    "meta by default": _within(lambda: torch.device("meta")),
    "fake": _within(_fake_mode),
    "no_grad": _within(torch.no_grad),
    "inference": _within(torch.inference_mode),
    "autocast": _within(lambda: torch.autocast("cpu")),
    "profiler": _profiled,
    "grad": _grad,
    "vmap": _vmap,
    "functionalize": _functionalized,
    "jit.trace": _traced,
    "make_fx": _make_fx,
    "export": _exported,
}


def _described(t):
    if isinstance(t, (list, tuple)):
        return [_described(i) for i in t]
    if not isinstance(t, torch.Tensor):
        return t
    kind = type(t).__name__
    if kind == "FakeTensor" or t.is_meta:
        return kind, tuple(t.shape), str(t.dtype)
    if kind == "TwoTensor":
        return kind, _described(t.a)  # the Work is that of the first: nobody waits for the other
    if kind == "MaskedTensor":
        return kind, _described(t.get_data())
    if isinstance(t, Wrapper):
        return kind, _described(t.inner)
    if kind == "DTensor":
        return kind, _described(t.to_local())
    if torch._is_functional_tensor(t):
        torch._sync(t)
        return "functional", _described(torch._from_functional_tensor(t))
    if kind == "AsyncCollectiveTensor":
        return "Tensor", t.tolist()
    return kind, t.detach().resolve_conj().resolve_neg().tolist()


def outcome(group, operation, kind="plain", mode="none", asynchronous=False, outputs=False):
    cell = Cell(group, kind, outputs, asynchronous)
    x = torch.arange(1.0, 5.0) * (cell.rank + 1)
    Watchful.seen.clear()
    with warnings.catch_warnings(), contextlib.ExitStack():
        warnings.simplefilter("ignore")
        try:
            got, seen = MODES[mode](lambda t: OPERATIONS[operation](t, cell), x)
            return "gives", _described(got), seen, sorted(set(Watchful.seen))
        except Exception as error:
            return "refuses", f"{type(error).__name__}: {error}"[:300]


# Kinds that gloo does not look for, and takes for the memory below. It is given what they are worth.
_WORTH = {"negative": "plain", "conjugate": "complex", "zero": "zeros"}


def better(operation, kind="plain", mode="none", **_):
    """Why gloo refuses what we need not, or None."""
    if operation == "all_gather_into_tensor" and kind in ("parameter", "in a graph"):
        return "it copies into views of the output"
    if kind in ("conjugate", "complex"):
        return "it cannot do some complex operations"
    if kind == "inference" and operation == "gather":
        return "rank 0 does not tell that it has refused"
    if mode == "grad" and operation in ("reduce_scatter_tensor", "scatter"):
        return "it copies outside of the transform"
    if kind == "parameter" and operation == "gather":
        return "rank 0 does not tell that it has refused"
    return None


# A TwoTensor's second half goes after its first, and nobody waits for it.
_UNWAITED = {"message", "batch_isend_irecv"}
# torch looks for wrappers in a list of tensors, not in a list of lists: gloo takes those for memory, and ends by a
# signal.
_LISTED = {"scatter": False, "reduce_scatter": False, "all_gather": True, "gather": True}  # whether as outputs
_NO_MEMORY = {"asynchronous", "DTensor", "fake", "TwoTensor", "masked", "wrapper", "silent", "zero", "functional"}


def fails_on_gloo(operation, kind="plain", outputs=False, mode="none", **_):
    if operation == "scatter" and kind in ("conjugate", "meta") and not outputs:
        return True  # rank 0 refuses, and rank 1 waits
    if kind == "TwoTensor" and operation in _UNWAITED:
        return True
    if mode in ("make_fx", "export") and operation in (*_UNWAITED, "broadcast_object_list"):
        return True  # nobody waits for the graph's messages; and rank 0 alone looks into objects
    if mode == "grad" and operation == "scatter":
        return True  # rank 0 refuses, and rank 1 waits
    if mode == "vmap" and operation == "functional":
        return True  # torch stacks the results before it waits for them
    return kind in _NO_MEMORY and operation in _LISTED and (outputs or not _LISTED[operation])


SECONDS = timedelta(seconds=15)
_groups = {}


def agree(cell):
    """What is wrong with a cell, or None. Where gloo fails altogether, it is enough that we are alive."""
    found = both(**cell)
    theirs, ours = found["gloo"], found["custom"]
    same = theirs == ours or theirs[0] == ours[0] == "refuses" or theirs[0] == "fails"
    if cell.get("mode", "none") == "none" and cell.get("kind") in _WORTH:
        same = same or ours[0] == "refuses"  # by c10d itself, or a class; never other values
    if same or (better(**cell) and "refuses" in (theirs[0], ours[0])):
        return None
    return f"{cell}: gloo {theirs}, custom {ours}"


def both(**cell):
    """{backend: outcome} of a cell. A group is not used again on which not all ranks have come to the same end, or that
    is closed: it may be out of step."""
    found = {"gloo": ("fails",)}
    for backend in ("custom",) if fails_on_gloo(**cell) else ("gloo", "custom"):
        if backend not in _groups:
            _groups[backend] = dist.new_group(backend=backend, timeout=SECONDS)
        worth = _WORTH.get(cell.get("kind")) if backend == "gloo" else None
        found[backend] = outcome(_groups[backend], **{**cell, **({"kind": worth} if worth else {})})
        refused = found[backend][0] == "refuses"
        # torch leaves a group coalescing whose calls have raised inside the context: later ones would not be made.
        dist.distributed_c10d._world.pg_coalesce_state.pop(_groups[backend], None)
        closed = refused and re.search("[Cc]losed|[Tt]imed out|of no more use", found[backend][1])
        votes = torch.tensor([refused, bool(closed)], dtype=torch.int32)
        dist.all_reduce(votes)
        if votes[0] % SIZE or votes[1]:
            group = _groups.pop(backend)
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
    return found
