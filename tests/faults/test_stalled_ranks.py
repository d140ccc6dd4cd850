"""Ranks whose process is stopped: each wait ends with its own time-out, and says who is missing and what each rank
does. Every way to give a time-out, for every operation. Who goes on later is told, too."""

import os
import random
import re
import signal
import statistics
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CustomBackendError

from .operations import COLLECTIVES, LONG, Arena, Asked, all_reduce, wait_for_future

SECONDS = 1.0  # the time-outs of these tests
BOUND = max(0.05 * SECONDS, 0.1)
APART = 0.03  # s between two calls' beginnings: their ends are timed, so they must not all come at once


@contextmanager
def stopped(pid):
    """Its process is, inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pids():
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def timed(call):
    """(seconds, error)"""
    began = time.monotonic()
    try:
        work = call()
        if work is not None:
            work.wait()
        return time.monotonic() - began, None
    except CustomBackendError as error:
        return time.monotonic() - began, error


def all_at_once(calls):
    """Each in a thread of its own; the results of `timed`."""
    results = [None] * len(calls)

    def run(i):
        results[i] = timed(calls[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
        time.sleep(APART)
    for thread in threads:
        thread.join()
    return results


# --- every operation, and every way to give a time-out


def by_options(asynchronous):
    def way(g, name):
        work = COLLECTIVES[name][0](g, Arena(), Asked(seconds=SECONDS, asynchronous=asynchronous))
        work.wait()

    return way


def by_group(g, name):
    g._set_default_timeout(timedelta(seconds=SECONDS))
    COLLECTIVES[name][0](g, Arena(), Asked(5000)).wait()  # through the rings, but quickly made


def by_wait(g, name):
    COLLECTIVES[name][0](g, Arena(), Asked(asynchronous=True)).wait(timedelta(seconds=SECONDS))


def behind_another(g, name):
    """Its own time-out, a shorter one, would begin once the call before it is over."""
    first = all_reduce(g, Arena(), Asked(seconds=SECONDS, asynchronous=True))
    try:
        COLLECTIVES[name][0](g, Arena(), Asked(seconds=SECONDS / 4, asynchronous=True)).wait()
    except CustomBackendError as error:
        assert "its collective #2 timed out" in str(error), error
    first.wait()


WAYS = {
    "options": by_options(False),
    "options, async": by_options(True),
    "group": by_group,
    "wait": by_wait,
    "behind": behind_another,
}


def short_forms():
    """{name: a call in one of c10d's short forms, with a time-out by position or name}"""
    t, seconds, op = torch.ones, timedelta(seconds=SECONDS), dist.ReduceOp.SUM

    def ts(g):
        return [t(3) for _ in range(g.size())]

    return {
        "broadcast": lambda g: g.broadcast(t(3), 0, seconds),
        "broadcast, named": lambda g: g.broadcast(t(3), root=0, timeout=seconds),
        "allreduce": lambda g: g.allreduce(t(3), op, seconds),
        "allreduce, list": lambda g: g.allreduce([t(3)], op, timeout=seconds),
        "reduce": lambda g: g.reduce(t(3), 0, op, seconds),
        "reduce, named": lambda g: g.reduce(t(3), 0, op=op, timeout=seconds),
        "allgather": lambda g: g.allgather(ts(g), t(3), seconds),
        "gather": lambda g: g.gather(ts(g) if g.rank() == 0 else [], t(3), 0, seconds),
        "scatter": lambda g: g.scatter(t(3), ts(g) if g.rank() == 0 else [], 0, seconds),
        "reduce_scatter": lambda g: g.reduce_scatter(t(3), ts(g), op, seconds),
        "alltoall_base": lambda g: g.alltoall_base(t(6), t(6), [], [], seconds),
        "barrier": lambda g: g.barrier(seconds),
        "barrier, named": lambda g: g.barrier(timeout=seconds),
        "monitored_barrier": lambda g: g.monitored_barrier(seconds, g.rank() == 0),
    }


def through_dist():
    """{name: a call of dist's on a group with the time-out, and to whom the last rank is the other side}"""
    last, t = dist.get_world_size() - 1, torch.ones

    def coalesced(g):
        with dist._coalescing_manager(g):
            dist.all_reduce(t(3), group=g)
            dist.all_reduce(t(4), group=g)

    def batch(g):
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, t(LONG), last, g), dist.P2POp(dist.irecv, t(3), last, g)]
        ):
            work.wait()

    return {
        "send": lambda g: dist.send(t(LONG), last, g),
        "recv": lambda g: dist.recv(t(3), last, g),
        "recv, any source": lambda g: dist.recv(t(3), None, g, tag=5),
        "isend": lambda g: dist.isend(t(LONG), last, g).wait(),
        "irecv": lambda g: dist.irecv(t(3), last, g).wait(),
        "batch_isend_irecv": batch,
        "coalesced": coalesced,
        "all_gather_object": lambda g: dist.all_gather_object([None] * (last + 1), "x", group=g),
        "broadcast_object_list": lambda g: dist.broadcast_object_list(["x"], last, g),
        "all_reduce, future": lambda g: wait_for_future(dist.all_reduce(t(3), group=g, async_op=True)),
    }


def to_a_message(wait_by):
    def way(g):
        work = wait_by(g)
        work.wait(timedelta(seconds=SECONDS))

    return way


def messages_waited_for():
    last, t = dist.get_world_size() - 1, torch.ones
    return {
        "isend, wait": to_a_message(lambda g: dist.isend(t(LONG), last, g)),
        "irecv, wait": to_a_message(lambda g: dist.irecv(t(3), last, g)),
    }


def every_way(kind):
    """Returns [(what, seconds, error's type, its text)]; of the rank that was stopped, what it was told when it went
    on."""
    if kind in WAYS:
        what = {name: (lambda g, name=name: WAYS[kind](g, name)) for name in COLLECTIVES}
        if kind == "wait":
            what |= messages_waited_for()
            del what["sparse_all_reduce"]  # learns the ranks' sizes before it returns a Work
    else:
        what = short_forms() if kind == "short forms" else through_dist()
    rank, size, processes = dist.get_rank(), dist.get_world_size(), pids()
    timeout = timedelta(seconds=SECONDS) if kind == "dist" else None
    others = dist.new_group(list(range(size - 1)))
    groups = [dist.new_group(timeout=timeout) for _ in what]
    for g in groups:
        dist.all_reduce(torch.ones(7), group=g)
    dist.barrier()
    if rank < size - 1:

        def go():
            return all_at_once([lambda g=g, call=call: call(g) for g, call in zip(groups, what.values())])

        if rank == 0:
            with stopped(processes[-1]):
                dist.barrier(others)
                results = go()
                dist.barrier(others)
            dist.send(torch.ones(1), size - 1)
        else:
            dist.barrier(others)
            results = go()
            dist.barrier(others)
        found = [(name, seconds, type(error).__name__, str(error)) for name, (seconds, error) in zip(what, results)]
    else:
        dist.recv(torch.ones(1), 0)  # rank 0 stops this process meanwhile
        found = []
        if kind not in ("wait", "short forms", "dist"):
            for name, g in zip(what, groups):
                seconds, error = timed(lambda g=g: dist.all_reduce(torch.ones(3), group=g))
                found.append((name, seconds, type(error).__name__, str(error)))
    dist.barrier()
    for g in [*groups] + [others] * (rank < size - 1):
        dist.destroy_process_group(g)
    return found


def problems(rank, name, seconds, kind, text, size):
    missing, wrong = f"rank {size - 1}", []
    if kind != "CollectiveTimeoutError":
        wrong.append(f"{kind} instead of a time-out")
    elif name == "monitored_barrier" and rank:
        pass  # it has heard nothing from rank 0, which waits for the last rank
    elif f"{missing} (pid" not in text or "its process is stopped" not in text:
        wrong.append("does not say that the last rank is stopped")
    elif "last entered all_reduce #1 SUM float32[7]" not in text:
        wrong.append("does not say what the last rank did")
    # Of two ranks that wait, one's time is over first, and the other may have come later.
    if seconds < SECONDS - BOUND and "(found by" not in text or seconds > SECONDS + 2:
        wrong.append(f"after {seconds:.3f} s")
    return [f"rank {rank}, {name}: {w}: {text}" for w in wrong]


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("kind", [*WAYS, "short forms", "dist"])
def test_the_call_s_own_time_out(ranks, kind):
    *waited, went_on = ranks.run(every_way, kind)
    wrong = []
    for rank, found in enumerate(waited):
        for case in found:
            wrong += problems(rank, *case, ranks.world_size)
    for name, seconds, error, text in went_on:
        if error != "CollectiveTimeoutError" or "too late" not in text or seconds > 2:
            wrong.append(f"who went on, {name}: after {seconds:.3f} s {error}: {text}")
    assert not wrong, "\n".join(wrong)
    over = [seconds - SECONDS for found in waited for _, seconds, _, _ in found]
    assert statistics.median(over) < BOUND, sorted(over)


# --- stopped amid a call that all have entered


def amid(seed, count, trials):
    """Each trial: the last rank is stopped at some moment of one long all_reduce after another. [(seconds that the wait
    took, error, text)], and of the rank that was stopped (0, error, text)."""
    rank, size, processes = dist.get_rank(), dist.get_world_size(), pids()
    rng = random.Random(seed)
    others, found = dist.new_group(list(range(size - 1))), []
    for _ in range(trials):
        delay = rng.uniform(0.0, 0.1)
        g = dist.new_group(timeout=timedelta(seconds=SECONDS))
        t = torch.ones(count)
        stop = threading.Timer(delay, os.kill, (processes[-1], signal.SIGSTOP))
        dist.barrier()
        if rank == 0:
            stop.start()
        error, began = None, time.monotonic()
        while error is None:
            t.fill_(1.0)
            began = time.monotonic()
            try:
                dist.all_reduce(t, group=g)
            except CustomBackendError as raised:
                error = raised
            else:
                assert torch.equal(t, torch.full_like(t, float(size)))
        found.append((time.monotonic() - began if rank < size - 1 else 0.0, type(error).__name__, str(error)))
        if rank == 0:
            stop.join()
        if rank < size - 1:
            dist.barrier(others)
        if rank == 0:
            os.kill(processes[-1], signal.SIGCONT)
        dist.barrier()
        dist.destroy_process_group(g)
    if rank < size - 1:
        dist.destroy_process_group(others)
    return found


@pytest.mark.world_sizes(4)
def test_stopped_amid_a_call(ranks):
    *waited, went_on = ranks.run(amid, 7, 1 << 20, 4)
    wrong, last = [], f"rank {ranks.world_size - 1}"
    for rank, found in enumerate(waited):
        for seconds, error, text in found:
            named = re.search(r"(Missing|behind): ([^.]*)\.", text)
            if (
                error != "CollectiveTimeoutError"
                or not named
                or named[2] != last
                or "its process is stopped" not in text
            ):
                wrong.append(f"rank {rank}, after {seconds:.3f} s: {error}: {text}")
    for _, error, text in went_on:
        # If nothing was left for it to wait for, its call succeeds (the contents were checked), and the next is
        # refused.
        call, dead = re.search(r"all_reduce #(\d+)", text), re.search(r"its collective #(\d+) timed out", text)
        of_the_next = error == "CustomBackendError" and dead and int(call[1]) == int(dead[1]) + 1
        if not of_the_next and (error != "CollectiveTimeoutError" or "too late: rank" not in text):
            wrong.append(f"who went on: {error}: {text}")
    assert not wrong, "\n".join(wrong)
    # Timed from the beginning of the call in which it was stopped.
    over = [seconds - SECONDS for found in waited for seconds, _, _ in found]
    assert statistics.median(over) < BOUND and max(over) < 2, sorted(over)


def message_amid(stop_sender):
    """One of two ranks is stopped amid a long message; (seconds, error, text)."""
    rank, processes = dist.get_rank(), pids()
    victim = 0 if stop_sender else 1
    g = dist.new_group(timeout=timedelta(seconds=SECONDS))
    t = torch.ones(1 << 22)
    dist.all_reduce(torch.ones(7), group=g)
    if rank != victim:
        threading.Timer(0.03, os.kill, (processes[victim], signal.SIGSTOP)).start()
    error = None
    while error is None:
        began = time.monotonic()
        try:
            dist.send(t, 1, group=g) if rank == 0 else dist.recv(t, 0, group=g)
        except CustomBackendError as raised:
            error = raised
    seconds = time.monotonic() - began
    os.kill(processes[victim], signal.SIGCONT)
    dist.barrier()
    dist.destroy_process_group(g)
    return seconds, type(error).__name__, str(error)


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("stop_sender", [True, False], ids=["sender", "receiver"])
def test_stopped_amid_a_message(ranks, stop_sender):
    found = ranks.run(message_amid, stop_sender)
    victim = 0 if stop_sender else 1
    seconds, error, text = found[1 - victim]
    assert error == "CollectiveTimeoutError" and f"rank {victim} (pid" in text and "its process is stopped" in text, (
        found
    )
    assert SECONDS - BOUND < seconds < SECONDS + 1, found
    _, error, text = found[victim]
    assert error == "CollectiveTimeoutError" and f"rank {1 - victim}" in text and "is stopped" not in text, found
