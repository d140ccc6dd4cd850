"""Runs of the benchmark that a larger measurement is made of: each a command of its own, that can be repeated by
hand."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 600  # s, of one part
BENCH = "-m", "c10d_custom", "bench"
OWN = (str(Path(__file__).parent),)


@dataclass(frozen=True)
class Part:
    name: str
    options: tuple  # of bench
    mpi_ranks: int = 0  # 0: bench starts its ranks itself
    command: tuple = BENCH  # to Python

    def launcher(self) -> list[str] | None:
        """None where there is no mpiexec to launch with: that of this Python, else of PATH."""
        if not self.mpi_ranks:
            return []
        found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
        return [found, "-n", str(self.mpi_ranks)] if found else None

    def text(self) -> str:
        return shlex.join(
            [
                *(["mpiexec", "-n", str(self.mpi_ranks)] if self.mpi_ranks else []),
                "python",
                *self.command,
                *self.options,
            ]
        )


def run(part: Part) -> tuple[Any, str | None]:
    """(what it wrote as JSON, None), or (None, why there is nothing)."""
    if (launcher := part.launcher()) is None:
        return None, "there is no mpiexec: pip install mpi4py mpich"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.json"
        command = [*launcher, sys.executable, *part.command, *part.options, "--json", str(file)]
        try:
            out = subprocess.run(command, text=True, capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return None, f"not done after {TIMEOUT} s"
        if out.returncode or not file.exists():
            last = (out.stderr or out.stdout).strip().splitlines()[-1:] or [f"exit status {out.returncode}"]
            return None, last[0]
        result = json.loads(file.read_text())
        for name, why in result.get("missing", {}).items():
            return None, f"{name} is not timed: {why}"
        return result, None
