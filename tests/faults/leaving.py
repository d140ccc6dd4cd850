"""Ranks that leave in every way a program can: what their exits take, and what they write on the way out.

    python tests/faults/leaving.py [--trials 5] [--ways raise,interrupt] [--json]

Ranks are forked from this process, which has imported torch, and then reach the end of this file as any program its
own: their interpreters end as usual, with exit handlers. Each writes into files of its own.
"""

import argparse
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from datetime import timedelta

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from forked import serve_store, store_at

PR_SET_PDEATHSIG = 1
SIZE = 3
LIMIT = 20.0  # s: a trial's longest
LONG = 300_000  # elements: more than any buffer of the group's

_callbacks = []


# --- what keeps a rank inside the group: each waits for one that does not come


def in_all_reduce():
    dist.all_reduce(torch.ones(LONG))


def in_work_wait():
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def in_send():
    dist.send(torch.ones(LONG), (dist.get_rank() + 1) % SIZE)


def in_recv():
    dist.recv(torch.ones(3), (dist.get_rank() + 1) % SIZE)


def in_recv_from_any():
    dist.recv(torch.ones(3))


def in_monitored_barrier():
    dist.group.WORLD.monitored_barrier()


def in_new_group():
    dist.new_group()


INSIDE = {
    f.__name__[3:]: f
    for f in (in_all_reduce, in_work_wait, in_send, in_recv, in_recv_from_any, in_monitored_barrier, in_new_group)
}


def start_work():
    """Work of every kind, that cannot end."""
    to = (dist.get_rank() + 1) % SIZE
    future = dist.all_reduce(torch.ones(LONG), async_op=True).get_future()
    _callbacks.append(future.then(lambda f: f.value()))
    dist.all_reduce(torch.ones(40)[::2], async_op=True)
    dist.isend(torch.ones(LONG), to, tag=1)
    dist.irecv(torch.ones(LONG), to, tag=2)
    dist.all_gather_into_tensor(torch.ones(3 * SIZE), torch.ones(3), async_op=True)


def be_idle():
    """Not in one sleep: Python would miss a signal that comes between its last look and the sleep's beginning."""
    for _ in range(600):
        time.sleep(0.1)


# --- ways: of each rank, a function. Rank 0 is the one that differs


def others_notice(rank=1):
    """The other ranks: their waits end with an error that names who left. What is in flight elsewhere lacks rank 1."""
    if rank == 2:
        start_work()
    try:
        dist.recv(torch.ones(LONG), 0, tag=9)
    except dist.DistBackendError as error:
        if not re.search(r"rank [01] (has left|\(pid)", str(error)):
            raise
        sys.exit(0)
    raise AssertionError("no error")


def destroy_with_work_in_flight(rank):
    if rank == 0:
        start_work()
        dist.destroy_process_group()
    else:
        others_notice(rank)


def end_without_destroy(rank):
    if rank:
        others_notice()


def end_with_work_in_flight(rank):
    if rank:
        others_notice(rank)
    else:
        start_work()


def end_beside_a_waiting_thread(rank):
    if rank == 0:
        for inside in (in_recv, in_work_wait):
            threading.Thread(target=quietly, args=(inside,), daemon=True).start()
        time.sleep(0.1)
    else:
        others_notice()


def quietly(call):
    try:
        call()
    except dist.DistBackendError:
        pass


def raise_error(rank):
    if rank == 0:
        start_work()
        raise KeyError("of rank 0")
    others_notice(rank)


def call_sys_exit(rank):
    if rank == 0:
        start_work()
        sys.exit(7)
    others_notice(rank)


def raise_mismatch(rank):
    """The error of ours is the only traceback."""
    dist.all_reduce(torch.ones(3 + rank))


def wait_for_interrupt(inside):
    def way(rank):
        if rank < SIZE - 1:
            INSIDE[inside]()
        else:
            be_idle()

    return way


def interrupt_with_work_in_flight(rank):
    if rank:
        start_work()
    be_idle()


WAYS = {
    f.__name__: f
    for f in (
        destroy_with_work_in_flight,
        end_without_destroy,
        end_with_work_in_flight,
        end_beside_a_waiting_thread,
        raise_error,
        call_sys_exit,
        raise_mismatch,
        interrupt_with_work_in_flight,
    )
}
WAYS |= {f"interrupt_in_{inside}": wait_for_interrupt(inside) for inside in INSIDE}
# What rank 0 and the others end with: an exit code or the name of the error in their one traceback.
ENDS = {
    "destroy_with_work_in_flight": (0, 0),
    "end_without_destroy": (0, 0),
    "end_with_work_in_flight": (0, 0),
    "end_beside_a_waiting_thread": (0, 0),
    "raise_error": ("KeyError", 0),
    "call_sys_exit": (7, 0),
    "raise_mismatch": ("CollectiveMismatchError", "CollectiveMismatchError"),
}


# --- trials


def rank_main(way, rank, port, ready, folder):
    """Returns what is to be called at the end of the program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT, 0o600), fd)

    def program():
        dist.init_process_group(
            "custom", store=store_at(port, folder), rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
        )
        dist.all_reduce(torch.ones(3))
        os.write(ready, b"r")
        os.close(ready)
        WAYS[way](rank)

    return program


def what_is_wrong(text, wanted, twice):
    """With what a rank has written; ``wanted``: the name of the error that it tells in one traceback, of a call of the
    program's; or its exit code."""
    text = re.sub(r"(?m)^\[rank\d\]: ?", "", text)  # torch's hook marks each line
    if twice:  # the second may come while that hook, torch's own, is at work
        text = re.sub(
            r"Error in sys\.excepthook:\nTraceback.*\n(?:  .*\n)*  .*_distributed_excepthook\n(?:  .*\n)*\n*.*\n\n"
            r"Original exception was:\n",
            "",
            text,
        )
    for words in ("Fatal Python error", "terminate called", "Error in sys.excepthook"):
        if words in text:
            return words
    for ignored in re.findall(r"(?m)^Exception ignored .*\n(?:Traceback.*\n(?:  .*\n)*.*\n?)?", text):
        if not twice or "c10d_custom" in ignored:  # torch's own exit handlers may be interrupted, too
            return ignored
    # One that hears of a neighbour's interruption before its own comes tells both.
    text = re.sub(
        r"Traceback \(most recent call last\):\n(?:  .*\n)*.*gave up: KeyboardInterrupt.*\n\n"
        r"During handling of the above exception, another exception occurred:\n\n",
        "",
        text,
    )
    told = text.count("Traceback (most recent call last)")
    if not isinstance(wanted, str):
        return "a traceback" if told or "c10d_custom" in text else None
    if twice:
        return None  # the second may interrupt the telling of the first
    last = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Interrupt)\b", line)]
    return (
        None
        if told == 1 and "in <module>" in text and last and wanted in last[-1]
        else f"not one traceback of a {wanted}"
    )


def trial(way, again, port):
    """Runs one; ``again``: seconds to a second Ctrl-C, or None. Returns {"wrong": [...], "seconds": from what ends it
    to the last rank's end}; in a rank, what it is to call."""
    folder = tempfile.mkdtemp(prefix="leaving-")
    read, write = os.pipe()
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            os.close(read)
            return rank_main(way, rank, port, write, folder)
        pids.append(pid)
    os.close(write)
    ready = b""
    while len(ready) < SIZE and (more := os.read(read, SIZE)):
        ready += more
    os.close(read)
    interrupted = way.startswith("interrupt")
    if interrupted:
        time.sleep(0.2)
    began = time.monotonic()
    for pause in [0.0] * interrupted + [again] * (again is not None):
        time.sleep(pause)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
    codes = reap(pids, began + LIMIT)
    seconds = time.monotonic() - began
    wrong = []
    for rank, code in enumerate(codes):
        written = pathlib.Path(folder, f"err{rank}").read_text(errors="replace")
        wanted = "KeyboardInterrupt" if interrupted else ENDS[way][rank > 0]
        if code is None:
            wrong.append(f"rank {rank}: still there after {LIMIT:g} s; wrote:\n{written}")
        elif code not in ((-signal.SIGINT, 130) if interrupted else (wanted if isinstance(wanted, int) else 1,)):
            wrong.append(f"rank {rank}: exit code {code}, wrote:\n{written}")
        elif problem := what_is_wrong(written, wanted, again is not None):
            wrong.append(f"rank {rank}: {problem}; wrote:\n{written}")
    shutil.rmtree(folder)
    return {"way": way + (", twice" if again is not None else ""), "wrong": wrong, "seconds": seconds}


def reap(pids, deadline):
    """Their exit codes; None of those that had to be killed."""
    codes = [None] * len(pids)
    left = dict(enumerate(pids))
    while left and time.monotonic() < deadline:
        for rank, pid in list(left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del left[rank]
        time.sleep(1e-3)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def main():
    """None; in a rank, what it is to call."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trials", type=int, default=1, help="of each way")
    options.add_argument("--ways", default=",".join(WAYS), help="those whose names begin with these")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    chosen = [way for way in WAYS if way.startswith(tuple(given.ways.split(",")))]
    port, results = serve_store(), []
    for number in range(given.trials):
        for way in chosen:
            # The second Ctrl-C at another moment of the exit in each trial.
            for again in (None, 0.002 + 0.004 * number) if way.startswith("interrupt_in_a") else (None,):
                result = trial(way, again, port)
                if callable(result):
                    return result
                results.append(result)
    if given.json:
        print(json.dumps(results))
    else:
        for result in results:
            print(*result["wrong"], sep="\n", end="")
        for way in dict.fromkeys(r["way"] for r in results):
            seconds = [r["seconds"] for r in results if r["way"] == way]
            failed = sum(bool(r["wrong"]) for r in results if r["way"] == way)
            print(
                f"{way:45} trials {len(seconds):4}  failed {failed:3}  median {1e3 * statistics.median(seconds):7.1f} "
                "ms  "
                f"worst {1e3 * max(seconds):7.1f} ms"
            )
    if any(r["wrong"] for r in results):
        sys.exit(1)
    return None


if __name__ == "__main__":
    if program := main():
        program()
