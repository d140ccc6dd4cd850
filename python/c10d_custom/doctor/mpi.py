"""MPI: whether it is there, who started this process, and how a job over several hosts would start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from .finding import Finding, State, there

_SECONDS = 10.0
# The library says its version before MPI_Init, too. In a process of its own: a library may end the one that loads it.
_ASK = (
    "import mpi4py; "
    "mpi4py.rc.initialize = mpi4py.rc.finalize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)


def mpi() -> Finding:
    from ..launch import launcher, mpich_files
    from ..launch.mpi_job import INSTALL

    started = launcher.detect()
    name = started.name if started else "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else None
    mpirun = next((found for command in ("mpirun", "mpiexec", "srun") if (found := shutil.which(command))), None)
    facts: dict[str, Any] = {"launcher": name, "mpi4py": there("mpi4py", "mpi4py"), "library": None, "mpirun": mpirun}
    by = f"this process was started by {name}" if name else "no launcher started this process"
    if facts["mpi4py"] is None:
        text = f"no mpi4py: one host only; several need it ({INSTALL}); {by}"
        return Finding("MPI", text, State.REMARK if started else State.FINE, facts)
    library, problem = _library()
    facts["library"] = library
    if library is None:
        text = f"mpi4py {facts['mpi4py']} finds no MPI library ({problem}): one host only; {by}"
        return Finding("MPI", text, State.FAILS if started else State.REMARK, facts)
    how = mpirun or "its mpirun, which is not in PATH"
    if "open mpi" not in library.lower():
        how = f"torchrun, or {how}"
    text = f"mpi4py {facts['mpi4py']} with {library}; several hosts: start them by {how}; {by}"
    state = State.FINE
    if takes := mpich_files.taken_by(library):
        left, _ = mpich_files.megabytes()
        facts["dev_shm_megabytes"] = round(left, 1)
        if lacks := mpich_files.too_little(left, len(os.sched_getaffinity(0)), library):  # a rank for each core
            text, state = f"{text}; {lacks}", State.REMARK
        else:
            text += f"; it takes {takes:.1f} MB of /dev/shm for each rank of a host, of {left:.0f} left"
    return Finding("MPI", text, state, facts)


def _library() -> tuple[str | None, str]:
    """(what the MPI library calls itself, or None; then why)"""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    lines = [line.strip(" \0") for line in asked.stdout.splitlines() if line.strip(" \0")]
    if asked.returncode or not lines:
        said = asked.stderr.strip().splitlines()
        return None, said[-1] if said else f"exit status {asked.returncode}"
    return " ".join(lines[0].partition(",")[0].replace("Version:", "").split()), ""
