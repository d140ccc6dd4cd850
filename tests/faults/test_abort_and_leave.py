"""`abort` from another thread, and every way to leave: waiters are released at once, here and elsewhere, with an error
that says who did it; programs end without a hang, and without a traceback of ours."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import AbortedError
from harness.marks import MARK, kill_marked, marked
from programs.launch import LAUNCHER_VARIABLES, free_port

from .operations import COLLECTIVES, LONG, Arena, Asked, wait_for_future

HERE = Path(__file__).parent
BOUND = 2.0  # s, for waiters beside the one that aborts


# --- abort


def waits():
    """{name: a call on a group that waits for the last rank}"""
    last, t = dist.get_world_size() - 1, torch.ones
    return {
        **{name: lambda g, call=call: call(g, Arena(), Asked()).wait() for name, (call, _) in COLLECTIVES.items()},
        "long": lambda g: dist.all_reduce(t(LONG), group=g),
        "async": lambda g: dist.all_reduce(t(3), group=g, async_op=True).wait(),
        "queued": lambda g: [dist.all_reduce(t(3), group=g, async_op=True) for _ in range(5)][-1].wait(),
        "future": lambda g: wait_for_future(dist.all_reduce(t(3), group=g, async_op=True)),
        "send": lambda g: dist.send(t(LONG), last, g),
        "recv": lambda g: dist.recv(t(3), last, g),
        "recv, any source": lambda g: dist.recv(t(3), None, g),
        "monitored_barrier": lambda g: g.monitored_barrier(),
        # The two disagree, and wait for the third to have the table complete.
        "mismatch": lambda g: dist.all_reduce(t(3 + g.rank()), group=g),
    }


def until_it_calls(g, calls, seconds=2):
    """Until this rank's thread is in its call of the group ``g``, which had made so many before; or so many seconds
    have passed: not every call leaves a record."""
    limit = time.monotonic() + seconds
    while len(g.cpu_transport.trace()) <= calls and time.monotonic() < limit:
        time.sleep(0.005)


def raised_by(call, g):
    try:
        call(g)
        return None, time.monotonic()
    except Exception as error:
        ended = time.monotonic()
        # To log it, torch asks for the name of the group; once that is destroyed, this raises in turn.
        if isinstance(error, ValueError) and "not initialized" in str(error) and error.__context__:
            return error.__context__, ended
        return error, ended


def aborted(chosen):
    """[(name, when rank 0 aborted, when this rank's waiter was released, the error's type, its text, the next
    call's)]"""
    calls, rank, size, found = waits(), dist.get_rank(), dist.get_world_size(), []
    for name in chosen or calls:
        g = dist.new_group()
        if rank < size - 1:
            outcome = []
            waiter = threading.Thread(target=lambda: outcome.extend(raised_by(calls[name], g)))
            calls_before = len(g.cpu_transport.trace())
            waiter.start()
            until_it_calls(g, calls_before)
            time.sleep(0.03)
            at = time.monotonic()
            if rank == 0:
                time.sleep(0.02)  # the others wait, too
                at = time.monotonic()
                g.abort()
            waiter.join()
            error, released = outcome
            after = raised_by(lambda g: dist.barrier(g), g)[0]
            found.append((name, at, released, type(error).__name__, str(error), str(after)))
        dist.barrier()
        dist.destroy_process_group(g)
    return found


@pytest.mark.world_sizes(3)
def test_abort_releases_everyone(ranks):
    found = ranks.run(aborted, None)
    wrong, here, there = [], [], []
    for mine, theirs in zip(*found[:2]):
        for rank, (name, _, released, error, text, after) in enumerate((mine, theirs)):
            # The other has been told of the mismatch already, and waits for nothing but the table.
            if not (rank and name == "mismatch"):
                (there if rank else here).append(released - mine[1])
            # What two ranks disagree in may be told before they hear of the abort; Python's barrier has an error of its
            # own.
            good = {
                "mismatch": ("AbortedError", "CollectiveMismatchError"),
                "monitored_barrier": ("CollectiveTimeoutError",),
            }.get(name, ("AbortedError",))
            said = "aborted" in text or name in ("mismatch",)
            if error not in good or not said or rank and "AbortedError" == error and "rank 0" not in text:
                wrong.append(f"rank {rank}, {name}: {error}: {text}")
            if "abort" not in after and name != "mismatch":
                wrong.append(f"rank {rank}, {name}, the next call: {after}")
    assert not wrong, "\n".join(wrong)
    for seconds in here, there:
        assert statistics.median(seconds) < BOUND and max(seconds) < 10, sorted(seconds)


def aborted_while_moving(count, op, trials):
    """Rank 0 aborts amid a call in which all ranks are, none of which waits for long. Of each trial: (seconds, the
    error's type, its text)"""
    tensor, found = torch.ones(count), []
    outputs = [torch.ones(count) for _ in range(dist.get_world_size() * (op == "all_gather"))]
    for _ in range(trials):
        g, at = dist.new_group(), []
        call = (
            (lambda g: dist.all_reduce(tensor, group=g))
            if op == "all_reduce"
            else (lambda g: dist.all_gather(outputs, tensor, group=g))
        )

        def abort(g=g, at=at):
            at.append(time.monotonic())
            g.abort()

        if dist.get_rank() == 0:
            threading.Timer(0.05, abort).start()
        error = None
        while error is None:
            error, released = raised_by(call, g)
        found.append((released - at[0] if at else 0.0, type(error).__name__, str(error)))
        dist.destroy_process_group(g)
    return found


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_abort_amid_a_long_call(ranks, op):
    mine, theirs = ranks.run(aborted_while_moving, 1 << 27 if op == "all_reduce" else 1 << 26, op, 3)
    assert all(error == "AbortedError" for _, error, _ in mine), mine
    assert all(error == "AbortedError" and "by rank 0" in text for _, error, text in theirs), theirs
    assert statistics.median(seconds for seconds, _, _ in mine) < BOUND, mine


def aborts_twice_and_leaves():
    """Abort is done once; destroying comes after; and another group goes on."""
    g = dist.new_group()
    work = dist.all_reduce(torch.ones(3), group=g, async_op=True) if dist.get_rank() == 0 else None
    if dist.get_rank() == 0:
        for _ in range(3):
            g.abort()
        wrong = [] if isinstance(raised_by(lambda g: work.wait(), g)[0], AbortedError) else ["not aborted"]
    else:
        wrong = []
    began = time.monotonic()
    dist.destroy_process_group(g)
    t = torch.ones(3)
    dist.all_reduce(t)
    return wrong + ([] if t[0] == dist.get_world_size() else [t]), time.monotonic() - began


@pytest.mark.world_sizes(3)
def test_abort_and_destroy(ranks):
    assert not any(found := [wrong for wrong, _ in ranks.run(aborts_twice_and_leaves)]), found


# --- destroy with work in flight


def destroyed(name):
    """Rank 0 destroys the group in the midst of a call; the last rank comes to it afterwards."""
    g, call = dist.new_group(), waits()[name]
    rank, size = g.rank(), g.size()
    if rank == size - 1:
        dist.recv(torch.ones(1), 0)
        began = time.monotonic()
        error, ended = raised_by(call if name == "long" else lambda g: None, g)
        dist.barrier()
        dist.destroy_process_group(g)
        return ended - began, type(error).__name__, str(error)
    outcome = []
    waiter = threading.Thread(target=lambda: outcome.extend(raised_by(call, g)))
    calls_before = len(g.cpu_transport.trace())
    waiter.start()
    until_it_calls(g, calls_before, 20)  # all of these do, and a large tensor takes its time to make
    time.sleep(0.25)  # until it waits
    began = time.monotonic()
    if rank == 0:
        dist.destroy_process_group(g)
        waiter.join()
        seconds = time.monotonic() - began
        dist.send(torch.ones(1), size - 1)
    elif name == "long":
        waiter.join()
        seconds = outcome[1] - began
    dist.barrier()
    if rank:
        dist.destroy_process_group(g)
        waiter.join()
        seconds = time.monotonic() - began
    return seconds, type(outcome[0]).__name__, str(outcome[0])


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("name", ["long", "async", "future", "recv", "send"])
def test_destroy_releases_waiters(ranks, name):
    here, *others = ranks.run(destroyed, name)
    assert here[0] < 1 and here[1] == "AbortedError" and "destroyed" in here[2], here
    if name == "long":  # needs what rank 0 had in its hands; the other calls may end without it
        assert all(o[0] < 5 and o[1] == "PeerLostError" and "rank 0 has left" in o[2] for o in others), others


# --- the ends of programs


def ways(trials, chosen):
    command = [sys.executable, HERE / "leaving.py", "--json", "--trials", str(trials), "--ways", chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("chosen", ["destroy,end", "raise,call", "interrupt"])
def test_programs_end(chosen, full):
    if not full:
        chosen = {
            "destroy,end": "destroy,end_with_work,end_beside",
            "raise,call": "raise",
            "interrupt": "interrupt_with,interrupt_in_all_reduce,interrupt_in_new",
        }[chosen]
    results = ways(5 if full else 1, chosen)
    assert not any(r["wrong"] for r in results), "\n".join(
        "\n".join([r["way"], *r["wrong"]]) for r in results if r["wrong"]
    )
    # An interpreter that has imported torch takes its time to end.
    assert results and max(r["seconds"] for r in results) < 40, [(r["way"], r["seconds"]) for r in results]


SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def rank_main(rank, port=None):
    if port is None:
        dist.init_process_group("custom")
    else:
        dist.init_process_group("custom", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    os.write(1, b"ready\\n")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))
    time.sleep(60)

if __name__ == "__main__":
    if len(sys.argv) > 1:
        mp.spawn(rank_main, (int(sys.argv[1]),), nprocs=2)
    else:
        rank_main(None)
"""


def interrupted_job(command):
    """Starts it, sends what a terminal sends on Ctrl-C, once both ranks are ready. (seconds to its end, what it wrote,
    pids left over)"""
    mark = uuid.uuid4().hex
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=err,
            start_new_session=True,
            text=True,
            env={**environment, MARK: mark, "OMP_NUM_THREADS": "1"},
        )
        try:
            for _ in range(2):
                assert "ready" in process.stdout.readline()
            time.sleep(0.3)
            began = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            process.wait(40)
            seconds = time.monotonic() - began
            until = time.monotonic() + 2
            while (left := marked(mark)) and time.monotonic() < until:
                time.sleep(0.02)
        finally:
            kill_marked(mark)
            process.wait()
            process.stdout.close()
        err.seek(0)
        return seconds, err.read(), left


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_ctrl_c_under_a_launcher(launcher, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    else:
        command = [sys.executable, script, str(free_port())]
    seconds, wrote, left = interrupted_job(command)
    assert not left and seconds < 30, (seconds, left, wrote)  # two interpreters that end, on a busy machine
    assert "Exception ignored" not in wrote and "Fatal Python error" not in wrote and "SIGKILL" not in wrote, wrote
    # Each traceback with lines of ours is of the program's own call.
    for block in wrote.split("Traceback (most recent call last)")[1:]:
        if "c10d_custom" in block:
            assert "script.py" in block and "KeyboardInterrupt" in block, wrote
