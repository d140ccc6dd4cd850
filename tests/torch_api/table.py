"""What becomes of each name that torch gives a user of a group, a group, and a backend: one call that shows that it
works, or the words of the error that refuses it.

A *trial* is a function (place) -> None of one rank's Place; ``==`` in it raises where a result is wrong.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

SECONDS = timedelta(seconds=30)


@dataclass
class Place:
    """One of ``size`` ranks, its default group, and what the group answers for the backend of CPU tensors."""

    rank: int
    size: int
    group: object
    backend: object

    def mine(self, count=4):
        return torch.full((count,), float(self.rank + 1))

    @property
    def total(self):
        return float(sum(range(1, self.size + 1)))

    @property
    def everyone(self):
        return torch.cat([torch.full((4,), float(r + 1)) for r in range(self.size)])


@dataclass(frozen=True)
class Refused:
    """The call raises, and says these words."""

    words: str
    call: object


@dataclass(frozen=True)
class Inherited:
    """torch's own answer is right for a group of ours, and why."""

    why: str


def same(got, want):
    assert torch.equal(got, torch.as_tensor(want).expand_as(got)), (got, want)


def options(kind, **values):
    made = getattr(dist.distributed_c10d, kind)()
    for name, value in {"asyncOp": False, **values}.items():
        setattr(made, name, value)
    return made


def finished(work):
    if work is not None:
        assert work.wait()


# --- what a group and a backend both have: (place, target) -> None


def _broadcast(p, on):
    t = p.mine()
    finished(on.broadcast([t], options("BroadcastOptions", rootRank=1)))
    same(t, 2.0)


def _allreduce(p, on):
    t = p.mine()
    finished(on.allreduce([t], options("AllreduceOptions")))
    same(t, p.total)


def _allreduce_sparse(p, on):
    t = torch.sparse_coo_tensor([[p.rank]], [1.0], (p.size,))
    finished(on.allreduce_sparse([t], options("AllreduceOptions")))
    same(t.to_dense(), 1.0)


def _allreduce_coalesced(p, on):
    ts = [p.mine(), p.mine(2)]
    finished(on.allreduce_coalesced(ts, options("AllreduceCoalescedOptions")))
    for t in ts:
        same(t, p.total)


def _reduce(p, on):
    t = p.mine()
    finished(on.reduce([t], options("ReduceOptions", rootRank=0)))
    if p.rank == 0:
        same(t, p.total)


def _allgather(p, on):
    outputs = [torch.zeros(4) for _ in range(p.size)]
    finished(on.allgather([outputs], [p.mine()], options("AllgatherOptions")))
    same(torch.cat(outputs), p.everyone)


def _allgather_coalesced(p, on):
    outputs = [[torch.zeros(4)] for _ in range(p.size)]
    finished(on.allgather_coalesced(outputs, [p.mine()], options("AllgatherOptions")))
    same(torch.cat([o[0] for o in outputs]), p.everyone)


def all_gather_single(name):
    def trial(p, on):
        output = torch.zeros(4 * p.size)
        finished(getattr(on, name)(output, p.mine(), options("AllgatherOptions")))
        same(output, p.everyone)

    return trial


def all_gather_single_coalesced(name):
    def trial(p, on):
        output = torch.zeros(4 * p.size)
        finished(getattr(on, name)([output], [p.mine()], options("AllgatherOptions")))
        same(output, p.everyone)

    return trial


def _gather(p, on):
    outputs = [torch.zeros(4) for _ in range(p.size)]
    finished(on.gather([outputs] if p.rank == 0 else [], [p.mine()], options("GatherOptions", rootRank=0)))
    if p.rank == 0:
        same(torch.cat(outputs), p.everyone)


def gather_single(name):
    def trial(p, on):
        output = torch.zeros(4 * p.size if p.rank == 0 else 0)
        finished(getattr(on, name)(output, p.mine(), options("GatherOptions", rootRank=0)))
        if p.rank == 0:
            same(output, p.everyone)

    return trial


def _scatter(p, on):
    output = torch.zeros(4)
    finished(
        on.scatter([output], [list(p.everyone.split(4))] if p.rank == 0 else [], options("ScatterOptions", rootRank=0))
    )
    same(output, float(p.rank + 1))


def _reduce_scatter(p, on):
    output = torch.zeros(4)
    finished(on.reduce_scatter([output], [list(p.everyone.split(4))], options("ReduceScatterOptions")))
    same(output, float(p.size * (p.rank + 1)))


def reduce_scatter_single(name):
    def trial(p, on):
        output = torch.zeros(4)
        finished(getattr(on, name)(output, p.everyone, options("ReduceScatterOptions")))
        same(output, float(p.size * (p.rank + 1)))

    return trial


def reduce_scatter_single_coalesced(name):
    def trial(p, on):
        output = torch.zeros(4)
        finished(getattr(on, name)([output], [p.everyone], options("ReduceScatterOptions")))
        same(output, float(p.size * (p.rank + 1)))

    return trial


def _alltoall(p, on):
    outputs = [torch.zeros(4) for _ in range(p.size)]
    finished(on.alltoall(outputs, [p.mine() for _ in range(p.size)], options("AllToAllOptions")))
    same(torch.cat(outputs), p.everyone)


def all_to_all_single(name):
    def trial(p, on):
        output = torch.zeros(4 * p.size)
        finished(getattr(on, name)(output, p.mine(4 * p.size), [], [], options("AllToAllOptions")))
        same(output, p.everyone)

    return trial


def _send_recv(p, on):
    t = p.mine()
    if p.rank < 2:
        finished(on.send([t], 1, 7) if p.rank == 0 else on.recv([t], 0, 7))
    if p.rank == 1:
        same(t, 1.0)


def _recv_anysource(p, on):
    t = p.mine()
    if p.rank < 2:
        work = on.send([t], 1, 8) if p.rank == 0 else on.recv_anysource([t], 8)
        finished(work)
        if p.rank == 1:
            same(t, 1.0)
            assert work._source_rank() == 0


def _barrier(p, on):
    finished(on.barrier(options("BarrierOptions")))


def _set_timeout(p, on):
    before = p.group.timeout
    on.set_timeout(timedelta(seconds=17))
    assert p.group.timeout == timedelta(seconds=17)
    p.group.set_timeout(before)


def _ephemeral(p, on):
    """The time-out of calls is longer until the first one issued from now on is over."""
    on._add_ephemeral_timeout(timedelta(seconds=1000))
    plain = p.group.timeout.total_seconds()
    assert p.group._options(None, None)[1] == plain + 1000
    dist.barrier()
    assert p.group._options(None, None)[1] == plain


def _coalescing(p, on, start="_start_coalescing", end="_end_coalescing"):
    ts = [p.mine(), p.mine()]
    getattr(on, start)(torch.device("cpu")) if on is p.group else getattr(on, start)()
    for t in ts:
        p.group.allreduce([t], options("AllreduceOptions", asyncOp=True))
    finished(getattr(on, end)(torch.device("cpu")) if on is p.group else getattr(on, end)())
    for t in ts:
        same(t, p.total)


def _sequence(p, on):
    dist.barrier()
    before = on._get_sequence_number_for_group()
    dist.barrier()
    assert on._get_sequence_number_for_group() == before + 1


def _new_group(p):
    return dist.new_group(list(range(p.size)), timeout=SECONDS)


def _abort(p, on):
    group = _new_group(p)
    target = group if on is p.group else group._get_backend(torch.device("cpu"))
    dist.barrier()
    target.abort()
    try:
        dist.all_reduce(p.mine(), group=group)
    except dist.DistBackendError as error:
        assert "abort" in str(error)
    else:
        raise AssertionError("a call on an aborted group")
    dist.destroy_process_group(group)


def _shutdown(p, on):
    group = _new_group(p)
    target = group if on is p.group else group._get_backend(torch.device("cpu"))
    target.shutdown()
    try:
        dist.all_reduce(p.mine(), group=group)
    except dist.DistBackendError:
        pass
    else:
        raise AssertionError("a call on a group that is shut down")
    dist.destroy_process_group(group)


def answers(name, want):
    """An attribute, or a method without arguments, that answers ``want`` (a function of the Place)."""

    def trial(p, on):
        got = getattr(on, name)
        got = got() if callable(got) else got
        assert got == want(p), (name, got, want(p))

    return trial


def _window(p, on):
    memory = torch.zeros(4)
    window = on.new_window(memory)
    window.put(p.mine(), (p.rank + 1) % p.size, 0)
    window.tensor_deregister()
    same(memory, float((p.rank - 1) % p.size + 1))


OPERATIONS = {
    "broadcast": _broadcast,
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce_coalesced,
    "reduce": _reduce,
    "allgather": _allgather,
    "allgather_coalesced": _allgather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _alltoall,
    "send": _send_recv,
    "recv": _send_recv,
    "recv_anysource": _recv_anysource,
    "barrier": _barrier,
    **{name: all_gather_single(name) for name in ("all_gather_single", "_allgather_base")},
    **{
        name: all_gather_single_coalesced(name)
        for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    },
    **{name: reduce_scatter_single(name) for name in ("reduce_scatter_single", "_reduce_scatter_base")},
    **{
        name: reduce_scatter_single_coalesced(name)
        for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    },
    **{name: all_to_all_single(name) for name in ("all_to_all_single", "alltoall_base")},
}
SETTINGS = {
    "set_timeout": _set_timeout,
    "_add_ephemeral_timeout": _ephemeral,
    "_start_coalescing": _coalescing,
    "_end_coalescing": _coalescing,
    "_get_sequence_number_for_group": _sequence,
    "abort": _abort,
    "shutdown": _shutdown,
    "_set_sequence_number_for_group": lambda p, on: on._set_sequence_number_for_group(),
    "_wait_for_pending_works": lambda p, on: on._wait_for_pending_works(),
    "rank": answers("rank", lambda p: p.rank),
    "size": answers("size", lambda p: p.size),
    "name": answers("name", lambda p: "custom"),
    "_get_backend_name": answers("_get_backend_name", lambda p: "c10d_custom"),
    "supports_reconfigure": answers("supports_reconfigure", lambda p: False),
    "supports_window": answers("supports_window", lambda p: True),
    "supports_abort_hooks": answers("supports_abort_hooks", lambda p: False),
    "supports_completion_hooks": answers("supports_completion_hooks", lambda p: False),
    "get_reconfigure_handle": Refused(
        "does not support get_reconfigure_handle", lambda p, on: on.get_reconfigure_handle()
    ),
    "reconfigure": Refused(
        "does not support reconfigure", lambda p, on: on.reconfigure(torch._C._distributed_c10d.ReconfigureOptions())
    ),
    "new_window": _window,
    "register_abort_hook": Refused(
        "does not support registerAbortHook", lambda p, on: on.register_abort_hook(1, print)
    ),
    "unregister_abort_hook": Refused("does not support unregisterAbortHook", lambda p, on: on.unregister_abort_hook(1)),
    "_register_on_completion_hook": Refused("onCompletion hook", lambda p, on: on._register_on_completion_hook(print)),
    "_enable_collectives_timing": Refused("enableCollectivesTiming", lambda p, on: on._enable_collectives_timing()),
}
