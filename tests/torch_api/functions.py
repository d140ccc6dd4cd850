"""Each public function of torch.distributed that takes a group, on the default group. See table.py."""

import torch
import torch.distributed as dist

from .table import SECONDS, Refused, _new_group, same


def on_all(call):
    """A collective whose tensor becomes the sum."""

    def trial(p):
        t = p.mine()
        call(t)
        same(t, p.total)

    return trial


def gathered(call):
    """A collective that leaves every rank's tensor in one."""

    def trial(p):
        output = torch.zeros(4 * p.size)
        call(output, p)
        same(output, p.everyone)

    return trial


def _all_gather(p):
    outputs = [torch.zeros(4) for _ in range(p.size)]
    dist.all_gather(outputs, p.mine())
    same(torch.cat(outputs), p.everyone)


def _all_gather_coalesced(p):
    outputs = [[torch.zeros(4)] for _ in range(p.size)]
    dist.all_gather_coalesced(outputs, [p.mine()])
    same(torch.cat([o[0] for o in outputs]), p.everyone)


def _all_reduce_coalesced(p):
    ts = [p.mine(), p.mine(2)]
    dist.all_reduce_coalesced(ts)
    for t in ts:
        same(t, p.total)


def _all_gather_object(p):
    got = [None] * p.size
    dist.all_gather_object(got, {"rank": p.rank})
    assert got == [{"rank": r} for r in range(p.size)]


def _all_to_all(p):
    outputs = [torch.zeros(4) for _ in range(p.size)]
    dist.all_to_all(outputs, [p.mine() for _ in range(p.size)])
    same(torch.cat(outputs), p.everyone)


def _broadcast(p):
    t = p.mine()
    dist.broadcast(t, 1)
    same(t, 2.0)


def _broadcast_object_list(p):
    got = ["this", 1] if p.rank == 0 else [None, None]
    dist.broadcast_object_list(got, 0)
    assert got == ["this", 1]


def _reduce(p):
    t = p.mine()
    dist.reduce(t, 0)
    if p.rank == 0:
        same(t, p.total)


def _gather(p):
    outputs = [torch.zeros(4) for _ in range(p.size)] if p.rank == 0 else None
    dist.gather(p.mine(), outputs, 0)
    if p.rank == 0:
        same(torch.cat(outputs), p.everyone)


def _gather_single(call):
    def trial(p):
        output = torch.zeros(4 * p.size) if p.rank == 0 else None
        getattr(dist, call)(p.mine(), output, 0)
        if p.rank == 0:
            same(output, p.everyone)

    return trial


def _gather_object(p):
    got = [None] * p.size if p.rank == 0 else None
    dist.gather_object(p.rank, got, 0)
    assert p.rank or got == list(range(p.size))


def _scatter(p):
    output = torch.zeros(4)
    dist.scatter(output, list(p.everyone.split(4)) if p.rank == 0 else None, 0)
    same(output, float(p.rank + 1))


def _scatter_object_list(p):
    got = [None]
    dist.scatter_object_list(got, list(range(p.size)) if p.rank == 0 else None, 0)
    assert got == [p.rank]


def _reduce_scatter(p):
    output = torch.zeros(4)
    dist.reduce_scatter(output, list(p.everyone.split(4)))
    same(output, float(p.size * (p.rank + 1)))


def _reduce_scatter_single(call):
    def trial(p):
        output = torch.zeros(4)
        getattr(dist, call)(output, p.everyone)
        same(output, float(p.size * (p.rank + 1)))

    return trial


def _send_recv(p):
    t = p.mine()
    if p.rank == 0:
        dist.send(t, 1)
    elif p.rank == 1:
        assert dist.recv(t, 0) == 0
        same(t, 1.0)


def _isend_irecv(p):
    t = p.mine()
    if p.rank == 0:
        dist.isend(t, 1).wait()
    elif p.rank == 1:
        dist.irecv(t, 0).wait()
        same(t, 1.0)


def _send_object_list(p):
    if p.rank == 0:
        dist.send_object_list(["a", 2], 1)
    elif p.rank == 1:
        got = [None, None]
        dist.recv_object_list(got, 0)
        assert got == ["a", 2]


def _new_subgroups(p):
    mine, groups = dist.new_subgroups(1)
    assert dist.get_world_size(mine) == 1 and len(groups) == p.size
    dist.destroy_process_group(mine)


def _new_subgroups_by_enumeration(p):
    mine, _ = dist.new_subgroups_by_enumeration([[r] for r in range(p.size)])
    assert dist.get_world_size(mine) == 1
    dist.destroy_process_group(mine)


def _split_group(p):
    made = dist.split_group(None, [list(range(p.size))[::-1]], timeout=SECONDS)
    assert made.rank() == p.size - 1 - p.rank and dist.get_backend(made) == "custom"
    t = p.mine()
    dist.all_reduce(t, group=made)
    same(t, p.total)
    dist.destroy_process_group(made)
    outside = dist.split_group(None, [[1]], timeout=SECONDS)
    assert (outside is dist.GroupMember.NON_GROUP_MEMBER) == (p.rank != 1)
    if p.rank == 1:
        dist.destroy_process_group(outside)


def _set_timeout(p):
    before = p.group.timeout
    dist.set_timeout(SECONDS)
    assert p.group.timeout == SECONDS and p.backend.options._timeout == SECONDS
    dist.set_timeout(before)


def _destroy(p):
    group = _new_group(p)
    dist.destroy_process_group(group)
    assert group not in dist.distributed_c10d._world.pg_map


def _monitored_barrier(p):
    dist.monitored_barrier(timeout=SECONDS)


def answers(name, want, *arguments):
    def trial(p):
        got = getattr(dist, name)(*(a(p) if callable(a) else a for a in arguments))
        assert got == want(p), (name, got)

    return trial


FUNCTIONS = {
    "all_reduce": on_all(lambda t: dist.all_reduce(t)),
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_gather_into_tensor": gathered(lambda o, p: dist.all_gather_into_tensor(o, p.mine())),
    "all_gather_single": gathered(lambda o, p: dist.all_gather_single(o, p.mine())),
    "all_gather_object": _all_gather_object,
    "all_to_all": _all_to_all,
    "all_to_all_single": gathered(lambda o, p: dist.all_to_all_single(o, p.mine(4 * p.size))),
    "barrier": lambda p: dist.barrier(),
    "broadcast": _broadcast,
    "broadcast_object_list": _broadcast_object_list,
    "destroy_process_group": _destroy,
    "gather": _gather,
    "gather_into_tensor": _gather_single("gather_into_tensor"),
    "gather_single": _gather_single("gather_single"),
    "gather_object": _gather_object,
    "get_backend": answers("get_backend", lambda p: "custom"),
    "get_backend_config": answers("get_backend_config", lambda p: "cpu:custom"),
    "get_backend_impl": answers("get_backend_impl", lambda p: p.backend),
    "get_global_rank": answers("get_global_rank", lambda p: 1, lambda p: p.group, 1),
    "get_group_rank": answers("get_group_rank", lambda p: 1, lambda p: p.group, 1),
    "get_process_group_ranks": answers("get_process_group_ranks", lambda p: list(range(p.size)), lambda p: p.group),
    "get_rank": answers("get_rank", lambda p: p.rank),
    "get_world_size": answers("get_world_size", lambda p: p.size),
    "irecv": _isend_irecv,
    "isend": _isend_irecv,
    "monitored_barrier": _monitored_barrier,
    "new_subgroups": _new_subgroups,
    "new_subgroups_by_enumeration": _new_subgroups_by_enumeration,
    "recv": _send_recv,
    "send": _send_recv,
    "recv_object_list": _send_object_list,
    "send_object_list": _send_object_list,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single("reduce_scatter_single"),
    "reduce_scatter_tensor": _reduce_scatter_single("reduce_scatter_tensor"),
    "scatter": _scatter,
    "scatter_object_list": _scatter_object_list,
    "set_timeout": _set_timeout,
    "shrink_group": Refused("shrink", lambda p: dist.shrink_group([p.size - 1])),  # c10d_custom.shrink_group does it
    "split_group": _split_group,
}
# torch before these refuses them to any backend that is not its own, or without an accelerator.
SINCE = {"monitored_barrier": (2, 14), "split_group": (2, 15)}
BEFORE = {
    "monitored_barrier": Refused("monitored_barrier", FUNCTIONS["monitored_barrier"]),
    "split_group": Refused("group", FUNCTIONS["split_group"]),
}
