"""Which MPI sends by libfabric, and the thread that drives it: launch/libfabric.py, backend/hosts/mpi_driver.h."""

import subprocess
import sys

import pytest

from c10d_custom.launch import libfabric

MPICH = "MPICH Version:      5.0.2\nMPICH ABI:          18:2:6\nMPICH Device:       {}\nMPICH configure:    --with-x"


@pytest.mark.parametrize(
    "version, variables, used",
    [
        (MPICH.format("ch4:ucx ofi"), {}, False),
        (MPICH.format("ch4:ucx ofi"), {"MPIR_CVAR_CH4_NETMOD": "ofi"}, True),
        (MPICH.format("ch4:ofi,ucx"), {"MPICH_CH4_NETMOD": "ucx"}, False),
        (MPICH.format("ch4:ofi"), {}, True),
        (MPICH.format("ch4:ofi"), {"MPIR_CVAR_CH4_NETMOD": "ucx"}, True),
        (MPICH.format("ch3:nemesis"), {"MPIR_CVAR_CH4_NETMOD": "ofi"}, False),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.8 (ANL base 3.4a2)", {}, True),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", {}, True),
        ("Open MPI v5.0.11, package: x", {"MPIR_CVAR_CH4_NETMOD": "ofi"}, False),
    ],
)
def test_which_mpi_sends_by_libfabric(monkeypatch, version, variables, used):
    for prefix in ("MPIR_CVAR", "MPIR_PARAM", "MPICH"):
        monkeypatch.delenv(f"{prefix}_CH4_NETMOD", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert libfabric.is_used(version) is used


# A process of its own: the thread is the process's. MPI_Iprobe here is a function that counts.
DRIVEN = """
import ctypes, os, time
from c10d_custom.launch import libfabric
from c10d_custom.native import over_hosts
calls = []
iprobe = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p)(
    lambda source, tag, comm, found, status: calls.append((source, tag, comm)) or RETURNS)
at = ctypes.cast(iprobe, ctypes.c_void_p).value
assert over_hosts.lib.c10d_drive_mpi(ctypes.byref(libfabric.Driver(at, 1 << 40, -2, -1))) == 0

def grows(seconds):
    before, until = len(calls), time.monotonic() + seconds
    while len(calls) < before + 3 and time.monotonic() < until:
        time.sleep(0.001)
    return len(calls) >= before + 3

assert grows(20)                               # as it begins
time.sleep(1.5)
before = len(calls)
time.sleep(1.5)
assert len(calls) - before <= 40, len(calls)   # nothing is sent: it sleeps nearly always
over_hosts.lib.c10d_transfer_begins()
assert grows(20)
assert set(calls) == {(-2, -1, 1 << 40)}
if os.fork() == 0:                             # a child has no such thread, and nothing to end
    over_hosts.lib.c10d_transfer_begins()
    over_hosts.lib.c10d_end_mpi_driver()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
libfabric.stop()
before = len(calls)
over_hosts.lib.c10d_transfer_begins()
time.sleep(0.3)
assert len(calls) == before
libfabric.stop()
print("well")
"""


@pytest.mark.parametrize("returns", [0, 5], ids=["", "MPI has failed"])
def test_the_thread_drives_mpi_after_something_was_sent(returns):
    code = DRIVEN.replace("RETURNS", str(returns))
    if returns:  # then it only asks now and then
        code = code.replace("assert grows(20)", "time.sleep(0.1)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "well\n", done
