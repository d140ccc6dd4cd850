"""Starts the demo's ranks with mpiexec, on this machine or over hosts that it emulates (see tests/rig/hosts.py); or,
over those, with torchrun."""

import os
import subprocess
import sys
from pathlib import Path


def start(ranks: int, hosts: int, arguments: list[str], by: str = "mpich") -> int:
    """Runs python with these arguments on every rank; the launcher's exit code. ``by``: mpich or torchrun."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from rig import Hosts
    from rig.mpi import Mpi

    mpi = Mpi.named(by)
    if reason := mpi.why_not():
        sys.exit(f"scripts/demo: {reason}; python -m pip install mpich mpi4py")
    argv = [mpi.python, *arguments]
    if hosts == 1:
        command = mpi.command([ranks], argv)
        os.execv(command[0], command)
    if reason := Hosts.why_not():
        sys.exit(f"scripts/demo: --hosts: {reason}")
    per_host = [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]
    with Hosts([f"host{letter}" for letter in "abcdefgh"[:hosts]]) as rig:
        print(f"{hosts} emulated hosts, ranks on each: {', '.join(map(str, per_host))}", flush=True)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
        forward = [name for name in environment if name.startswith(("C10D_", "GLOO_", "OMP_"))]
        return subprocess.run(
            mpi.command(per_host, argv, rig, forward), stdin=subprocess.DEVNULL, env=environment
        ).returncode
