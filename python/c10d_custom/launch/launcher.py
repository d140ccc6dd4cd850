"""Which MPI launcher started this process, told from the environment alone: no MPI, no torch.

A launcher gives every rank its place in variables of its own. Those are inherited by whatever the rank
starts, so each kind is believed only as far as its variables can be told from inherited ones."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from importlib.util import find_spec

from ..config import launcher_wanted


@dataclass(frozen=True)
class Launcher:
    """A rank's place in its job. The local ones are None where the launcher does not tell them."""

    name: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None

    def variables(self) -> dict[str, str]:
        """Returns the job's variables in torchrun's names, which scripts read."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def detect() -> Launcher | None:
    """The Launcher of this process, or None. Slurm comes last: under it the others may start ranks too.

    Asked only where one of the variables in the package's __init__.py is set, so that `import torch` need not load
    this: a new launcher has one there."""
    return _open_mpi() or _pmi() or _slurm()


def starts_mpi() -> bool:
    """Whether libmpi in this process has a launcher to ask. Not in a worker of torchrun, which mpirun or srun may have
    started; nor under a plain srun, which tells ranks and starts no MPI."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    found = detect()
    return found is not None and (found.name != "srun" or "PMI_FD" in os.environ or "PMIX_NAMESPACE" in os.environ)


def job_name() -> str:
    """What no two jobs of launchers have in common, where a launcher says so; "" under Hydra, which does not."""
    if namespace := os.environ.get("PMIX_NAMESPACE"):
        return namespace
    if detect() is not None and "SLURM_STEP_ID" in os.environ:
        return ".".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return ""


def watches() -> bool:
    """Whether a launcher has started this process that may end it once another one has ended."""
    return "TORCHELASTIC_RUN_ID" in os.environ or detect() is not None


def _number(*names: str) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return None


def _launcher(
    name: str, rank: int | None, size: int | None, local_rank: int | None, local_size: int | None
) -> Launcher | None:
    if rank is None or size is None or rank >= size:
        return None
    if size == 1:
        local_rank, local_size = 0, 1
    elif local_rank is None or local_size is None or local_rank >= local_size:
        local_rank = local_size = None
    return Launcher(name, rank, size, local_rank, local_size)


def _open_mpi() -> Launcher | None:
    return _launcher(
        "Open MPI",
        _number("OMPI_COMM_WORLD_RANK"),
        _number("OMPI_COMM_WORLD_SIZE"),
        _number("OMPI_COMM_WORLD_LOCAL_RANK"),
        _number("OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _pmi() -> Launcher | None:
    """Hydra (MPICH, Intel MPI, MVAPICH), Cray's launchers, and srun --mpi=pmi2. Where the launcher gave
    a connection as a file descriptor, subprocesses inherit its number but not the descriptor. Where it
    gave none (Cray) nothing tells them apart, and the variables are believed."""
    if "PMI_FD" in os.environ and not _is_open_socket(_number("PMI_FD")):
        return None
    slurm = _slurm()
    return _launcher(
        "PMI",
        _number("PMI_RANK"),
        _number("PMI_SIZE"),
        _number("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
        _number("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE") or (slurm.local_size if slurm else None),
    )


def _is_open_socket(fd: int | None) -> bool:
    try:
        return fd is not None and stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _slurm() -> Launcher | None:
    """srun. A batch script also has SLURM_PROCID=0, but it is no step."""
    if "SLURM_STEP_ID" not in os.environ:
        return None
    return _launcher(
        "srun",
        _number("SLURM_PROCID"),
        _number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        _number("SLURM_LOCALID"),
        _slurm_tasks_here(),
    )


def _slurm_tasks_here() -> int | None:
    """This node's entry of a list such as "4(x2),3": two nodes with 4 tasks, then one with 3."""
    node, counts = _number("SLURM_NODEID"), []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(tasks)] * int(times or 1)
    return counts[node] if node is not None and node < len(counts) else None


_filled: tuple[int, dict[str, str]] = (0, {})  # the process that filled its environment in, and with what


def fill_environment() -> None:
    """Gives scripts torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE: in init_process_group, and before
    where they ask for it (C10D_CUSTOM_LAUNCHER=import). Only where RANK is unset, and a value that is set stays. Not
    without mpi4py: the ranks could not find each other, so nothing may look as if they could."""
    global _filled
    if "RANK" in os.environ or not launcher_wanted():
        return
    launcher = detect()
    if launcher is None or find_spec("mpi4py") is None:
        return
    values = {name: value for name, value in launcher.variables().items() if name not in os.environ}
    os.environ.update(values)
    _filled = (os.getpid(), values)


def filled() -> bool:
    """Whether RANK is the one that `fill_environment` gave to this very process: children inherit the
    variables, and scripts overwrite them."""
    pid, values = _filled
    return pid == os.getpid() and "RANK" in values and os.environ.get("RANK") == values["RANK"]
