"""A group of two ranks, for real: made, used, destroyed, in processes that are gone afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from .finding import Finding, State
from .settings import refused

RANKS = 2
DEADLINE = 30.0  # s: for all of it
GROUP = 20  # s: the time-out of the ranks' group
_GRACE = 3.0  # s: for the other rank, once one has failed
# What launchers tell their ranks, and what writes files.
_NOT_FOR_RANKS = ("OMPI_", "PMI", "PALS_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "C10D_CUSTOM_TRACE")
_NAMES_OF_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
_SOURCES = str(Path(__file__).resolve().parents[2])
_RANK = "import sys; sys.path.append(sys.argv[1]); from c10d_custom.doctor import self_test as s; s.rank(*sys.argv[2:])"


def self_test() -> Finding:
    """Makes and uses a group of two ranks. The finding is FAILS where a rank fails or does not end."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="c10d_custom-doctor-") as folder:
        failure = _run(Path(folder), began + DEADLINE)
        used = 0.0 if failure else max(float(_last_words(Path(folder), rank)) for rank in range(RANKS))
    seconds = time.monotonic() - began
    facts: dict[str, Any] = {"ranks": RANKS, "seconds": round(seconds, 3), "group_seconds": used, "failure": failure}
    if failure:
        return Finding("self-test", f"failed after {seconds:.1f} s: {failure}", State.FAILS, facts)
    text = (
        f"{RANKS} ranks made a group, and all_reduce, send and recv gave what they must, in {used:.2f} s "
        f"({seconds:.1f} s with the start of their processes)"
    )
    return Finding("self-test", text, facts=facts)


def environment() -> dict[str, str]:
    """That of the ranks: of no launcher, and without settings that no group can be made with."""
    wrong = refused({name: value for name, value in os.environ.items() if name.startswith("C10D_CUSTOM_")})
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NOT_FOR_RANKS) and name not in _NAMES_OF_RANKS and name not in wrong
    }


def _run(folder: Path, deadline: float, command: Callable[[Path, int], list[str]] | None = None) -> str | None:
    """What went wrong, or None; no process is left. ``command``: what is started as a rank."""
    with contextlib.ExitStack() as ending:
        ranks = []
        for rank in range(RANKS):
            with open(folder / f"said{rank}", "wb") as said:
                process = subprocess.Popen(
                    (command or _command)(folder, rank),
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=environment(),
                )
            ending.callback(_end, process)
            ranks.append(process)
        while any(process.poll() is None for process in ranks):
            if any(process.poll() for process in ranks):
                deadline = min(deadline, time.monotonic() + _GRACE)
            if time.monotonic() >= deadline:
                break
            time.sleep(10e-3)
        codes = [process.poll() for process in ranks]
    failed = [rank for rank in range(RANKS) if codes[rank] != 0]
    if not failed:
        return None
    rank = min(failed, key=lambda r: codes[r] is None)  # one that waited for another says less
    code = codes[rank]
    how = "did not come to an end" if code is None else f"ended with status {code}"
    return f"rank {rank} {how}: {_last_words(folder, rank)}"


def _last_words(folder: Path, rank: int) -> str:
    lines = (folder / f"said{rank}").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _command(folder: Path, rank: int) -> list[str]:
    return [sys.executable, "-c", _RANK, _SOURCES, str(folder / "store"), str(rank)]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)


# --- a rank

_PR_SET_PDEATHSIG = 1
_MANY = 1 << 18  # floats: more than goes with the announcement of a call


def rank(store: str, rank_text: str) -> None:
    """Exits with status 0 if the group did what it must. Says last how many seconds it took, or what it did not do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not to outlive who started it
    status = 1
    try:
        print(_use(store, int(rank_text)), flush=True)
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
    os._exit(status)


def _use(store: str, rank: int) -> float:
    import torch
    import torch.distributed as dist

    began = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group(
        "custom", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=GROUP)
    )
    for count in (8, _MANY):
        values = torch.arange(float(count)) * (rank + 1)
        dist.all_reduce(values)
        _expect(values, torch.arange(float(count)) * 3, f"all_reduce of {count} floats")
    mine, theirs = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    if rank == 0:
        dist.send(mine, 1)
        dist.recv(theirs, 1)
        _expect(theirs, mine + 1, "send and recv")
    else:
        dist.recv(theirs, 0)
        dist.send(theirs + 1, 0)
    dist.destroy_process_group()
    return round(time.monotonic() - began, 3)


def _expect(got: object, wanted: object, what: str) -> None:
    import torch

    assert isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor)
    if not torch.equal(got, wanted):
        raise ValueError(f"{what} gave other values than it must")
