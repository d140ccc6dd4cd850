"""What is read from a launcher's variables, and the errors of a job that cannot begin; no mpiexec."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

from c10d_custom.launch import launcher
from c10d_custom.launch.launcher import Launcher
from c10d_custom.launch.rendezvous import addresses

PREFIXES = (
    "OMPI_",
    "PMI",
    "MPI_",
    "PALS_",
    "SLURM_",
    "C10D_CUSTOM_LAUNCHER",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
)
needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="no mpi4py in this environment")


@pytest.fixture
def environ(monkeypatch):
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    return lambda **values: [monkeypatch.setenv(k, str(v)) for k, v in values.items()]


SLURM = {
    "SLURM_STEP_ID": 0,
    "SLURM_PROCID": 6,
    "SLURM_STEP_NUM_TASKS": 9,
    "SLURM_LOCALID": 2,
    "SLURM_NODEID": 1,
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 2,
    "OMPI_COMM_WORLD_SIZE": 4,
    "OMPI_COMM_WORLD_LOCAL_RANK": 0,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
}
HYDRA = {"PMI_RANK": 1, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}


@pytest.mark.parametrize(
    "values,expected",
    [
        ({}, None),
        (OPEN_MPI, Launcher("Open MPI", 2, 4, 0, 2)),
        (HYDRA, Launcher("PMI", 1, 4, 1, 2)),
        ({**HYDRA, "PMI_FD": 987654}, None),
        ({**HYDRA, "PMI_FD": "junk"}, None),
        ({"PMI_RANK": 1, "PMI_SIZE": 4}, Launcher("PMI", 1, 4, None, None)),
        ({"PMI_RANK": 0, "PMI_SIZE": 1}, Launcher("PMI", 0, 1, 0, 1)),
        ({"PMI_RANK": 4, "PMI_SIZE": 4}, None),
        (SLURM, Launcher("srun", 6, 9, 2, 4)),
        ({**SLURM, "SLURM_NODEID": 2, "SLURM_LOCALID": 0}, Launcher("srun", 6, 9, 0, 1)),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 1}, None),  # a batch script
        ({**SLURM, "PMI_RANK": 6, "PMI_SIZE": 9}, Launcher("PMI", 6, 9, 2, 4)),
        ({**SLURM, **OPEN_MPI}, Launcher("Open MPI", 2, 4, 0, 2)),
    ],
)
def test_detect(environ, values, expected):
    environ(**values)
    assert launcher.detect() == expected


def test_a_live_pmi_connection_is_believed(environ):
    a, b = socket.socketpair()
    with a, b:
        environ(**HYDRA, PMI_FD=a.fileno())
        assert launcher.detect() == Launcher("PMI", 1, 4, 1, 2)


@needs_mpi
def test_what_is_set_stays(environ, monkeypatch):
    environ(**OPEN_MPI, LOCAL_RANK="7", LOCAL_WORLD_SIZE="1")
    for name in ("RANK", "WORLD_SIZE"):  # what fill_environment adds goes with this test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    launcher.fill_environment()
    assert [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["2", "4", "7", "1"]
    assert launcher.filled()
    environ(RANK="5")
    assert not launcher.filled()  # a script's own value
    launcher.fill_environment()
    assert os.environ["RANK"] == "5"


def test_switched_off(environ):
    environ(**OPEN_MPI, C10D_CUSTOM_LAUNCHER="0")
    launcher.fill_environment()
    assert "RANK" not in os.environ


def test_addresses_are_not_loopback():
    assert not [a for a in addresses() if a.startswith(("127.", "fe80")) or a == "::1"]


def python(code, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}
    return subprocess.run(
        [sys.executable, "-c", code],
        text=True,
        capture_output=True,
        timeout=60,
        env={**clean, **{k: str(v) for k, v in env.items()}},
    )


def test_without_mpi4py_the_error_is_torch_s_with_a_note():
    out = python(
        "import sys; sys.modules['mpi4py'] = None\nimport torch.distributed as dist; dist.init_process_group('custom')",
        **OPEN_MPI,
    )
    assert "environment variable RANK expected, but not set" in out.stderr
    assert 'pip install ".[mpi]" in a checkout' in out.stderr


def test_without_mpi4py_the_explicit_form_says_what_to_install():
    out = python(
        "import sys; sys.modules['mpi4py'] = None\n"
        "import torch.distributed as dist; dist.init_process_group('custom', init_method='mpi://')"
    )
    assert "TransportError" in out.stderr and 'pip install ".[mpi]" in a checkout' in out.stderr


@needs_mpi
@pytest.mark.parametrize(
    "code,words",
    [
        ("from mpi4py import MPI; MPI.Finalize()", "has been finalized"),
        (
            "import os; os.environ.update(SLURM_STEP_ID='0', SLURM_PROCID='1', SLURM_STEP_NUM_TASKS='3')",
            "do not belong together",
        ),
    ],
)
def test_a_job_that_cannot_begin(code, words):
    left = r"import os; print([f for f in mapped_files(r'/dev/shm/mpich_shm_\w+') if os.path.exists(f)])"
    imports = "from c10d_custom.launch import mpi_job\nfrom c10d_custom.launch import mapped_files"
    out = python(f"{code}\n{imports}\ntry:\n    mpi_job.job()\nfinally:\n    {left}")
    assert out.returncode and "TransportError" in out.stderr and words in out.stderr, out.stderr
    assert out.stdout == "[]\n"


@needs_mpi
def test_any_thread_level_does_on_one_host_and_is_refused_between_hosts():
    out = python(
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'; from mpi4py import MPI\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('custom', init_method='mpi://')\n"
        "dist.all_reduce(torch.ones(3), async_op=True).wait()\n"
        "from c10d_custom.creation.mpi_start import _found, _how, _Ranks\n"
        "from c10d_custom.creation.topology import Location\n"
        "places = [Location(name, name, 1, 0, 1, 0) for name in ('a', 'b')]\n"
        "_how([_found(0, places)] * 2, _Ranks(places, [0, 1]))"
    )
    assert "TransportError" in out.stderr and "gives less than MPI_THREAD_MULTIPLE" in out.stderr, out.stderr
    assert "a: rank 0: " in out.stderr and "b: rank 1: " in out.stderr, out.stderr


@needs_mpi
def test_waits_end_at_their_deadline():
    out = python("""
import time
from c10d_custom.launch.mpi_job import job
mpi = job()
assert job() is mpi and (mpi.rank, mpi.size) == (0, 1)
buffer = bytearray(1)
request = mpi.world.Irecv(buffer, 0)
start = time.monotonic()
assert not mpi.wait_all([request], start + 0.2)
assert 0.2 <= time.monotonic() - start < 5
mpi.wait_all([mpi.world.Isend(b"x", 0), request], time.monotonic() + 30)
assert buffer == b"x"
""")
    assert out.returncode == 0, out.stderr
