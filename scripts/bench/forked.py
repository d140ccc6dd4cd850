"""The ranks of ``python scripts/bench groups``: processes forked from one that has imported torch, as a program has
that makes a group, and nothing of this package but what `import torch` does. If asked to, each first takes its memory
for itself, as a process has it that a launcher has started: else who imports most pays for copies that belong to the
fork.

A round: all ranks wait at a gate; from its opening on, each makes a default group of the round's backend, and calls it.
They then make more groups of that backend, each of all ranks, and keep them. (A destroyed one's threads that end and
connections that close would take their time from the next, above all from that of another backend.)

Where groups can be made again (torch 2.15), the ranks of "custom" at last do that, by turns with making new ones."""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from c10d_custom.bench import noop

WHAT = "init", "call", "group", "group call"
REGROUPS = "regroup", "group beside"
_HOST = "127.0.0.1"
SECONDS = 100  # at most, of one round
_GROUPS, _FEWEST = 32, 3


def groups_of_a_round(size: int) -> int:
    """How many more groups a round makes."""
    return max(_FEWEST, _GROUPS // size)


def measured(size: int, names: Sequence[str], rounds: int, unshare: bool) -> dict[str, dict[str, list[float]]]:
    """{backend: {what: seconds until the slowest rank had it, each time}}. What: "init", a default group; "call", that
    and a first all_reduce; "group" and "group call", the same of another group."""
    found: dict[str, dict[str, list[float]]] = {name: {what: [] for what in (*WHAT, *REGROUPS)} for name in names}
    for round in range(rounds):
        for name in names if round % 2 == 0 else reversed(names):
            began, said = _round(size, name, unshare)
            for what in ("init", "call"):
                found[name][what].append(max(one[what] for one in said) - began)
            for what in ("group", "group call", *REGROUPS):
                found[name][what] += map(max, zip(*(one[what] for one in said), strict=True))
    return found


def _round(size: int, backend: str, unshare: bool) -> tuple[float, list[dict[str, Any]]]:
    """(when the gate opened, what each rank said)"""
    # Before the gate opens, or ranks that come to the store before it is served try again half a second later.
    agent, port = _store()
    (ready, is_ready), (gate, opens), (said, says), (end, ends) = (os.pipe() for _ in range(4))

    def rank_main(rank: int) -> None:
        for fd in (ready, opens, said, ends):
            os.close(fd)
        signal.alarm(SECONDS)
        if unshare:
            _unshare()
        os.close(is_ready)
        os.read(gate, 1)
        os.write(says, f"{json.dumps(_rank(rank, size, port, backend))}\n".encode())
        os.close(says)
        os.read(end, 1)  # nobody leaves while others may still need what it serves

    ranks = [_forked(rank_main, rank) for rank in range(size)]
    for fd in (is_ready, gate, says, end):
        os.close(fd)
    with os.fdopen(ready, "rb") as file:
        file.read()
    began = time.monotonic()
    os.close(opens)
    with os.fdopen(said) as answers:
        lines = [json.loads(line) for line in answers]
    os.close(ends)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    if any(statuses):
        raise SystemExit(f"bench: {size} ranks did not come to a group of the backend {backend!r}")
    return began, lines


def _store() -> tuple[int, int]:
    """(a process that serves a new store, as torchrun's agent does; its port)"""
    port, told = os.pipe()

    def serve(_: int) -> None:
        signal.alarm(SECONDS)
        store = dist.TCPStore(_HOST, 0, None, True, wait_for_workers=False)
        os.write(told, str(store.port).encode())
        os.close(told)
        signal.pause()

    agent = _forked(serve, 0)
    os.close(told)
    with os.fdopen(port) as file:
        return agent, int(file.read())


def _forked(main: Any, rank: int) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        main(rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _rank(rank: int, size: int, port: int, backend: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    store = dist.TCPStore(_HOST, port, None, False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    made = time.monotonic()
    _call(backend, None)
    called = time.monotonic()
    more: dict[str, list[float]] = {"group": [], "group call": []}
    for _ in range(groups_of_a_round(size)):
        for times, seconds in zip(more.values(), _another(backend, limit), strict=True):
            times.append(round(seconds, 6))  # short: a pipe takes so much as one
    again = _again(rank, size, store, limit) if backend == "custom" and hasattr(dist, "_reconfigure") else [[], []]
    return {"init": made, "call": called, **more, **dict(zip(REGROUPS, again, strict=True))}


def _again(rank: int, size: int, store: Any, limit: timedelta) -> list[list[float]]:
    """Seconds that it took to make a group again, and to make one more, each time."""
    dist.destroy_process_group()
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "timeout": limit}
    dist.init_process_group("custom", enable_reconfigure=True, **alone)
    store.set(f"handle {rank}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle {other}").decode() for other in range(size)]
    times: list[list[float]] = [[], []]
    dist._reconfigure(1, handles).wait()
    for number in range(2, 2 + groups_of_a_round(size)):
        for again, its in zip((True, False), times, strict=True):
            dist.barrier()
            began = time.monotonic()
            if again:
                dist._reconfigure(number, handles).wait()
            else:
                dist.new_group()
            its.append(round(time.monotonic() - began, 6))
    return times


def _unshare() -> None:
    """Write to each page of this process's own memory that is there, as it is: what a fork shares is copied now. Not to
    the stack, on which the call itself that writes may keep something."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    with open("/proc/self/pagemap", "rb") as file:
        for where, mode, *_, name in lines:
            if mode != "rw-p" or name == "[stack]":
                continue
            first, last = (int(address, 16) for address in where.split("-"))
            file.seek(first // mmap.PAGESIZE * 8)
            entries = array.array("Q", file.read((last - first) // mmap.PAGESIZE * 8))
            for number, entry in enumerate(entries):
                if entry >> 63:  # see the kernel's documentation of pagemap: it is present
                    byte = ctypes.c_ubyte.from_address(first + number * mmap.PAGESIZE)
                    byte.value = byte.value


def _another(name: str, limit: timedelta) -> tuple[float, float]:
    """Seconds that it took to make another group, and with its first call."""
    dist.barrier()
    began = time.monotonic()
    group = dist.new_group(backend=name, timeout=limit)
    made = time.monotonic() - began
    _call(name, group)
    called = time.monotonic() - began
    return made, called


def _call(name: str, group: Any) -> None:
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    if name != noop.NAME and t.item() != dist.get_world_size():
        raise SystemExit(f"bench: a wrong sum of the backend {name!r}")


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    noop.register()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(json.dumps(measured(*arguments)))
