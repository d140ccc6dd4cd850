"""No wait without a way out: where streams and hosts wait in transport/cuda, found in its source; and what becomes of
each wait for another rank when that rank stalls. (fake_driver.py adds: streams wait for nothing that would not end.)"""

import ast
import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed.distributed_c10d import AllToAllOptions, BroadcastOptions, ReduceOptions

from c10d_custom import threads
from c10d_custom.errors import CustomBackendError
from c10d_custom.transport import cuda
from c10d_custom.transport.cuda import stream_op
from c10d_custom.transport.cuda import transport as cuda_transport
from device_tensors import device_tensor, options, warm
from fake_world import World
from thread_ranks import run_ranks

SOURCES = {path.name: path.read_text() for path in Path(cuda.__file__).parent.glob("*.py")}

# What else waits must be looked at here first: who ends it?
STREAMS = {
    ("stream_op.py", "begin"),  # for this rank's
    ("stream_op.py", "join"),
}
HOSTS = {
    ("staged_messages.py", "withdraw")  # the message has a deadline
}


@pytest.mark.parametrize("us, awake", [("0", 0), ("1000000", 50)])
def test_a_poll_stays_awake_as_long_as_waits_of_the_cpu_do(us, awake, monkeypatch):
    monkeypatch.setenv("C10D_CUSTOM_SPIN_US", us)
    threads._spin.cache_clear()
    slept, asked = [], iter(range(50))
    monkeypatch.setattr(threads.time, "sleep", slept.append)
    try:
        assert stream_op.poll(lambda: next(asked, "over") == "over", time.monotonic() + 60, lambda: False)
    finally:
        monkeypatch.undo()
        threads._spin.cache_clear()
    assert len(slept) == 50 - awake, slept


def found(sources):
    """(where a stream waits, where a host waits without a deadline), as (file, function)"""
    streams, hosts = set(), set()
    for file, text in sources.items():
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    at, name = (file, function.name), called(node)
                    if re.match("cu[A-Z].*Wait", name or "") or name == "wait" and "river" in ast.unparse(node.func):
                        streams.add(at)
                    if without_deadline(node):
                        hosts.add(at)
    return streams, hosts


def called(node):
    """The name of what it calls, or None."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def without_deadline(node):
    if isinstance(node, ast.While):
        inside = {called(n) for n in ast.walk(node)}
        asks = {called(n) for n in ast.walk(node.test)} & {"done", "idle", "completed", "reached", "query"}
        return bool(asks or inside & {"sleep", "wait", "wait_for"}) and "monotonic" not in inside
    if not isinstance(node, ast.Call):
        return False
    name, given = called(node) or "", len(node.args) + len(node.keywords)
    if name in ("wait", "join", "acquire", "get", "result"):
        return given == 0
    if name == "poll":
        return given != 3
    return (name == "wait_for" and given < 2) or "synchronize" in name.lower()


def test_whatever_waits_has_a_way_out():
    assert found(SOURCES) == (STREAMS, HOSTS)
    calls = re.findall(r"\bcu[A-Z]\w+", SOURCES["driver.py"])
    assert len(calls) > 20 and not [name for name in calls if "Synchronize" in name or "WaitValue" in name]


PUT_IN = [
    "self._driver.wait(stream, theirs)",
    "self._thread.join()",
    "self._wake.wait()",
    "self._lock.acquire()",
    "self._queue.get()",
    "future.result()",
    "self._changed.wait_for(self._live)",
    "torch.cuda.synchronize()",
    "event.synchronize()",
    "self._cuda.cuStreamSynchronize(stream)",
    "poll(done, until)",
    "while not self._driver.done(event): pass",
    "while self._busy: time.sleep(1e-3)",
    "while not self._wake.wait(0.1): self._look()",
    "while not stream_op.completed(): time.sleep(1e-3)",
]


@pytest.mark.parametrize("wait", PUT_IN)
def test_a_wait_that_is_put_in_is_found(wait):
    with_it = {**SOURCES, "peers.py": f"{SOURCES['peers.py']}\n\ndef put_in(self):\n    {wait}\n"}
    assert found(with_it) != (STREAMS, HOSTS)


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
@pytest.mark.parametrize("mode", ["shared", "p2p"])
def test_a_rank_that_stalls_holds_nobody(mode, kind, monkeypatch):
    """It lives, and its stream hangs."""
    monkeypatch.setattr(cuda_transport, "_DRAIN", 0.5)
    world, gate = World(5), threading.Event()
    config = {"cuda_mode": mode}
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
