"""A program that never names this backend runs as if the package were not installed, whatever started it: by the
variables that launchers leave, of which no launcher is needed."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from c10d_custom.launch.launcher import detect

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_HOSTNAME": "here"}
LAUNCHERS = {
    "Slurm": SLURM,
    "PMIx": {
        **SLURM,
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "slurm.7.0",
    },
    "Hydra": HYDRA,
    "Intel MPI": {**HYDRA, "I_MPI_INFO_NP": "2", "I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_FABRICS": "shm:ofi"},
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_RANK": "1",
        "PMIX_NAMESPACE": "prterun-here-7@1",
    },
}

# torch imports what its entry point names; a torch that asks nobody when a group names a backend wants it registered.
MODULES = {"c10d_custom"}
if not hasattr(dist.Backend, "_ensure_backend_registered"):
    parts = ("c10d", "c10d.registration")
    MODULES |= {f"c10d_custom.{part}" for part in parts}

# Distributed only if RANK is set, as nanoGPT's and torchvision's scripts; then gloo, in two ways.
PROGRAM = """
import atexit, json, os, signal, socket, sys, threading, warnings
def state():
    names = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    links = [os.readlink(name) for name in names if os.path.exists(name)]
    return {
        "environment": dict(os.environ),
        "threads": [len(os.listdir("/proc/self/task")), sorted(t.name for t in threading.enumerate())],
        "descriptors": sorted(link.partition("[")[0] for link in links),
        "modules": sorted(sys.modules),
        "files": sorted({line.split()[-1] for line in open("/proc/self/maps") if "/" in line and "memfd" not in line}),
        "handlers": [atexit._ncallbacks(), sys.excepthook.__qualname__, len(warnings.filters)]
        + [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
    }
import torch
said = {"imported": state(), "distributed": "RANK" in os.environ}
import torch.distributed as dist
try:
    dist.init_process_group("gloo")
except Exception as error:
    said["without RANK"] = [type(error).__name__, str(error), getattr(error, "__notes__", [])]
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = str(s.getsockname()[1])
for how in ({"init_method": f"file://{sys.argv[1]}", "rank": 0, "world_size": 1}, {}):
    os.environ.update({} if how else {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    dist.init_process_group("gloo", **how)
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t.tolist() == [1] * 3
    said[f"gloo by {how.get('init_method', 'env')[:4]}"] = state()
    dist.destroy_process_group()
for each in said.values():
    if isinstance(each, dict):
        each["environment"].pop("MASTER_PORT", None)
with open(f"{sys.argv[1]}.json", "w") as out:
    json.dump(said, out)
"""


def ran(variables, store, autoload):
    """What the program says of itself in that environment, with a live connection to a launcher of PMI."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    ours, launchers = socket.socketpair()
    with ours, launchers:
        if "PMI_RANK" in variables:
            variables = {**variables, "PMI_FD": f"{launchers.fileno()}"}
        out = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(store)],
            env={**environment, **variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": f"{int(autoload)}"},
            pass_fds=[launchers.fileno()],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert out.returncode == 0 and not out.stderr, out.stderr
    return json.loads(store.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """{launcher: what the program said}; None: of one that torch runs without looking for packages like ours."""
    folder = tmp_path_factory.mktemp("stores")
    with ThreadPoolExecutor(2) as pool:
        of = {name: pool.submit(ran, variables, folder / name, True) for name, variables in LAUNCHERS.items()}
        of[None] = pool.submit(ran, SLURM, folder / "reference", False)
        return {name: future.result() for name, future in of.items()}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_variables_are_those_of_a_launcher(launcher, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("PMI", "OMPI_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    assert detect() is not None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_differs(said, launcher):
    here, reference = said[launcher], said[None]
    assert here["distributed"] is reference["distributed"] is False
    assert here["without RANK"] == reference["without RANK"], "torch's own error"
    for when in ("imported", "gloo by file", "gloo by env"):
        environment = here[when].pop("environment")
        for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "PMI_FD"):
            environment.pop(name, None)
        mine = {name: value for name, value in environment.items() if name not in os.environ}
        expected = {} if when != "gloo by env" else {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        assert mine == {**LAUNCHERS[launcher], **expected}, when
        modules = set(here[when].pop("modules")) - set(reference[when]["modules"])
        assert modules <= MODULES, f"{when}: {modules - MODULES}"
        assert not {m for m in reference[when]["modules"] if m.startswith("c10d_custom")}
        for what, found in here[when].items():
            assert found == reference[when][what], (when, what)
