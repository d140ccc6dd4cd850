"""How the benchmark's ranks start: by torchrun or mpirun, if one of them started this process; else by us. And what
keeps their cores busy meanwhile."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..creation.topology import Location
from ..launch.launcher import detect

if TYPE_CHECKING:
    from ..launch.launcher import Launcher


def under_mpi() -> bool:
    """Whether an MPI launcher started this process."""
    return detect() is not None


def launched() -> bool:
    """Whether this process already is one rank of a job, and must start none."""
    return "RANK" in os.environ or under_mpi()


def is_first() -> bool:
    """Whether a launched process is rank 0. RANK, where set, wins over MPI's, as in init_process_group."""
    return int(os.environ["RANK"]) == 0 if "RANK" in os.environ else cast("Launcher", detect()).rank == 0


def count(ranks: int) -> int:
    """How many ranks the job has, or would have: ``ranks``, if this process is to start them."""
    if not launched():
        return ranks
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else cast("Launcher", detect()).size


def run(function: Callable[..., object], ranks: int, *args: Any) -> int:
    """``function(*args)`` on every rank, within an initialised default group "custom". Launched: on this one, and
    ``ranks`` says nothing; else on so many new processes. 1 if it gave something true on one of them, else 0."""
    if not launched():
        from torch.distributed.elastic.utils.distributed import get_free_port

        try:
            mp.spawn(_spawned, (ranks, get_free_port(), function, args), nprocs=ranks)
        except mp.ProcessExitedException:  # its rank has said why
            return 1
        return 0
    try:
        return int(_run(function, args, init_method="env://"))
    except BaseException as error:
        # MPI's Finalize, at exit, would wait for ranks that wait for this one.
        mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
        if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
            print(error) if isinstance(error, SystemExit) else traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            mpi.COMM_WORLD.Abort(1)
        raise


def _spawned(rank: int, ranks: int, port: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    if _run(function, args, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks):
        sys.exit(1)


def _run(function: Callable[..., object], args: tuple[Any, ...], **init: Any) -> bool:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("custom", timeout=timedelta(seconds=120), **init)
    failed = function(*args)
    dist.destroy_process_group()
    return bool(failed)


def first_said(text: str | None) -> str | None:
    """What the first rank says that says something, alike on all ranks; None where none does."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    return next((each for each in said if each is not None), None)


_sums = itertools.count()


def sum_through_store(number: int) -> int:
    """The sum over all ranks, by nothing that the benchmark times."""
    # c10d gives the default group's store by this name alone.
    store, key = dist.PrefixStore("bench", dist.distributed_c10d._get_default_store()), f"sum {next(_sums)}"
    store.add(key, number)
    store.add(f"{key} ranks", 1)
    while store.add(f"{key} ranks", 0) < dist.get_world_size():
        time.sleep(0.001)
    return store.add(key, 0)


def hosts() -> list[dict[str, Any]]:
    """[{"name", "ranks", "cores", "load"}] of every host of the job, in the order of their first ranks."""
    mine = (Location.here().host, socket.gethostname(), len(os.sched_getaffinity(0)), os.getloadavg()[0])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    ranks = Counter(host for host, *_ in every)
    first = {host: rest for host, *rest in reversed(every)}
    return [
        {"name": first[b][0], "ranks": n, "cores": first[b][1], "load": round(first[b][2], 2)} for b, n in ranks.items()
    ]


# They go when their parent does, however it ends.
_BURN = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(10 ** 6):
        pass
"""


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Inside, ``count`` processes burn a core each, for figures on a machine that has other work."""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", _BURN, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for b in burners:
            b.kill()
        for b in burners:
            b.wait()
