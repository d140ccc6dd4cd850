"""No wait without a way out: where streams and hosts wait in transport/cuda, found in its source; and what becomes of
each wait for another rank when that rank stalls. (fake_driver.py adds: streams wait for nothing that would not end.)"""

import ast
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed.distributed_c10d import AllToAllOptions, BroadcastOptions, ReduceOptions

from c10d_custom.errors import CustomBackendError
from c10d_custom.transport import cuda
from c10d_custom.transport.cuda import transport as cuda_transport
from device_tensors import device_tensor, options, warm
from fake_world import World
from thread_ranks import run_ranks

SOURCES = sorted(Path(cuda.__file__).parent.glob("*.py"))


def calls(names):
    """{(file, function): [calls there of methods of these names]}"""
    found = {}
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                        found.setdefault((path.name, function.name), []).append(node)
    return found


def test_streams_wait_in_the_orders_and_for_their_own_alone():
    """What else lets a stream wait must be looked at here first: who ends it?"""
    of_driver = {
        key: nodes
        for key, all_nodes in calls({"wait", "wait_value"}).items()
        if (nodes := [n for n in all_nodes if n.args and "river" in ast.unparse(n.func)])
    }
    assert set(of_driver) == {
        ("event_order.py", "reuse"),  # other ranks', where the orders have a way out: see below
        ("event_order.py", "arrive"),
        ("order.py", "_await"),
        ("order.py", "trial"),  # ended by the helper, at the latest in `let_go`
        ("stream_op.py", "begin"),  # this rank's
        ("stream_op.py", "join"),
    }
    assert set(calls({"wait_value"})) == {("order.py", "_await"), ("order.py", "trial"), ("driver.py", "wait_value")}


def test_hosts_wait_with_a_deadline():
    bare = [
        f"{file}: {function}: {ast.unparse(node)}"
        for (file, function), nodes in calls({"wait", "join", "acquire", "get"}).items()
        for node in nodes
        if not node.args and not node.keywords
    ]
    assert bare == []
    assert calls({"synchronize"}) == {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "poll":
                assert len(node.args) == 3, f"{path.name}: {ast.unparse(node)}"


def all_to_all(r):
    o = AllToAllOptions()
    o.asyncOp = True
    inputs, outputs = ([device_tensor(r, 100, 1.0) for _ in range(r.size)] for _ in range(2))
    return r.pg.alltoall(outputs, inputs, o)


def reduce(r):
    o = ReduceOptions()
    o.asyncOp, o.rootRank = True, 0
    return r.pg.reduce([device_tensor(r, 100, 1.0)], o)


def broadcast(r):
    o = BroadcastOptions()
    o.asyncOp, o.rootRank = True, 1
    return r.pg.broadcast([device_tensor(r, 100, 1.0)], o)


KINDS = {
    "all_reduce": lambda r: r.pg.allreduce([device_tensor(r, 100, 1.0)], options(True)),
    "all_reduce, two-shot": lambda r: r.pg.allreduce([device_tensor(r, 50_000, 1.0)], options(True)),
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": lambda r: r.pg.allgather(
        [[device_tensor(r, 100, 0.0) for _ in range(r.size)]], [device_tensor(r, 100, 1.0)]
    ),
    "reduce_scatter": lambda r: r.pg.reduce_scatter(
        [device_tensor(r, 100, 0.0)], [[device_tensor(r, 100, 1.0) for _ in range(r.size)]]
    ),
    "all_to_all": all_to_all,
    "barrier": lambda r: r.pg.barrier(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["host", "values", "events", "p2p"])
def test_a_rank_that_stalls_holds_nobody(order, kind, monkeypatch):
    """It lives, and its stream hangs. By events the others' streams hang with it until it is ended."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 0.5)
    world, gate = World(5), threading.Event()
    config = {"cuda_mode": "p2p"} if order == "p2p" else {"cuda_mode": "shared", "cuda_order": order}
    ended = threading.Barrier(3)

    def body(r):
        warm(r)
        r.pg.set_timeout(timedelta(seconds=0.5))
        if r.rank == 1:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=gate.is_set)
        began = time.monotonic()
        work = KINDS[kind](r)
        with pytest.raises(CustomBackendError):
            work.wait()
            while time.monotonic() < began + 5:  # what does not hold the host has failed by its time-out
                r.pg.allreduce([device_tensor(r, 10, 1.0)], options(False, 0.5))
                time.sleep(0.05)
        assert time.monotonic() - began < 5
        if r.rank == 1 and order == "events":
            world.kill(1)
            r.pg._closed = True
        ended.wait(20)
        until = time.monotonic() + 5
        while time.monotonic() < until and (held := [s for s in world.streams if s.rank == r.rank != 1 and s.ops]):
            world.step()
            time.sleep(1e-3)
        assert r.rank == 1 or not held, [s.ops[0].label for s in held]
        ended.wait(20)
        gate.set()

    run_ranks(
        3, body, config=config, world=world, gpus=[f"GPU-{q}" for q in range(3)], clean=False, may_race=True, seconds=40
    )
